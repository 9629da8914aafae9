"""Low-rank adapters on experts: of a tensor of all experts' weights, W[e] = W₀[e] + s·B[e]·A[e], merged like others.

PEFT calls such tensors by `target_parameters`. In its folders the factors of all experts are one matrix each, A with
the experts one below the other and B with their ranks interleaved; of the two tensors of a layer the first lies under
`base_layer`, where both have adapters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from panoply.lora import names
from panoply.policies.experts import TENSORS, Experts, Router

INNER = "base_layer"


class LowRankExperts(nn.Module):
    """The factors of one tensor, [experts, outputs, inputs], which is frozen and follows them."""

    def __init__(self, weight: nn.Parameter, origin: Tensor, rank: int, scale: float):
        super().__init__()
        many, self.out_features, self.in_features = weight.shape
        weight.requires_grad_(False)
        self._tensor, self.origin, self.scale = [weight], _Origin(origin), scale
        wide = torch.promote_types(weight.dtype, torch.float32)
        on: dict[str, Any] = {"dtype": wide, "device": weight.device}
        self.lora_A = nn.Parameter(torch.zeros(many, rank, self.in_features, **on))
        self.lora_B = nn.Parameter(torch.zeros(many, self.out_features, rank, **on))

    @property
    def like(self) -> Tensor:
        return self._tensor[0]

    @property
    def rank(self) -> int:
        return self.lora_A.shape[1]

    @torch.no_grad()
    def merge(self) -> None:
        """Write round(W₀ + s·B·A) where the tensor lies, an expert at a time."""
        for whole, start, a, b in zip(self.like, self.origin.tensor, self.lora_A, self.lora_B, strict=True):
            whole.copy_((b @ a).mul_(self.scale).add_(start))

    def slopes(
        self, g: Tensor, x: Tensor, plan: Any, pairs: int, kernels: ModuleType
    ) -> tuple[Tensor, Tensor]:
        """∂A and ∂B without ∂W, from what pairs were given and the slope by what they put out.

        With u = x·A[e]ᵀ and v = g·B[e] they are sums over an expert's pairs: ∂A[e] = s·Σ v ⊗ x, ∂B[e] = s·Σ g ⊗ u.
        """
        a, b = ((self.scale * factor).detach().to(x.dtype) for factor in (self.lora_A, self.lora_B))
        u = kernels.product(x, a, None, plan, pairs)
        v = kernels.product(g, b.transpose(1, 2), None, plan, pairs)
        found: tuple[Tensor, Tensor] = (kernels.slope(v, x, plan, a), kernels.slope(g, u, plan, b))
        return found[0].to(self.lora_A.dtype), found[1].to(self.lora_B.dtype)


class _Origin:
    """W₀, which never changes, so that copies of a model share it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def __deepcopy__(self, _: Mapping[int, Any]) -> _Origin:
        return self


def expert_tensors(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """A model's tensors of experts that could have adapters, and their shapes."""
    return {
        f"{name}.{tensor}": tuple(getattr(layer, tensor).shape)
        for name, layer in model.named_modules()
        if isinstance(layer, Experts)
        for tensor in TENSORS
    }


def adapt_experts(model: nn.Module, base: nn.Module, name: str, rank: int, scale: float) -> None:
    """Give a tensor of experts factors; `base` has it as it was."""
    place, _, tensor = name.rpartition(".")
    layer, origin = model.get_submodule(place), getattr(base.get_submodule(place), tensor)
    setattr(layer, f"{tensor}_factors", LowRankExperts(getattr(layer, tensor), origin.detach(), rank, scale))


# ------------------------------------------------------------------ PEFT's folders


def to_peft(name: str, layer: LowRankExperts, both: bool, paired: bool) -> dict[str, Tensor]:
    """Factors under the names, and in the shapes, that PEFT has them.

    both     whether the layer's other tensor has adapters too
    paired   whether gates and what they multiply take turns in the layout, where they are halves here
    """
    place, _, tensor = name.rpartition(".")
    inside = f"{place}.{INNER}" if both and tensor == TENSORS[0] else place
    b = layer.lora_B.detach()
    if paired and tensor == TENSORS[0]:
        b = torch.stack(b.chunk(2, dim=1), dim=2).flatten(1, 2)
    return {
        f"{inside}.lora_A": layer.lora_A.detach().flatten(0, 1),
        f"{inside}.lora_B": b.permute(1, 2, 0).flatten(1, 2),
    }


def from_peft(a: Tensor, b: Tensor, experts: int, paired: bool) -> tuple[Tensor, Tensor]:
    """[experts, rank, inputs] and [experts, outputs, rank] of PEFT's matrices."""
    b = b.reshape(len(b), -1, experts).permute(2, 0, 1)
    if paired:
        b = torch.cat([b[:, 0::2], b[:, 1::2]], dim=1)
    return a.reshape(experts, -1, a.shape[1]), b.contiguous()


def own_name(layer: str, layers: set[str], targets: list[str]) -> str:
    """Our name of what PEFT's folder has factors for: of a layer of experts, which of its tensors, and of routers."""
    if layer.endswith(".mlp.gate"):
        return f"{layer.removesuffix('gate')}router"
    place = layer.removesuffix(f".{INNER}")
    if not place.endswith(".experts"):
        return layer
    if layer != place:
        return f"{place}.{TENSORS[0]}"
    if f"{place}.{INNER}" in layers:
        return f"{place}.{TENSORS[1]}"
    own = [f"{place}.{tensor}" for tensor in TENSORS]
    return next((name for name in own if any(names(word, name) for word in targets)), own[0])


def target_parameters(adapted: Collection[str], model: nn.Module) -> list[str]:
    """What PEFT calls tensors of experts: by the ends of their names, where all layers' are adapted; else whole."""
    there = expert_tensors(model)
    said = {name: ".".join(name.split(".")[-3:]) for name in there}
    parted = {said[name] for name in there if name not in adapted}
    return sorted({name if said[name] in parted else said[name] for name in adapted})


def routers(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """A model's routers, which have no adapters that learn, and the shapes of their weights."""
    return {n: tuple(m.weight.shape) for n, m in model.named_modules() if isinstance(m, Router)}
