"""Low-rank adapters of this library's own decoder: merged into its weights, so that it stays a plain model.

A layer keeps W₀, as it was, and float32 factors A and B. After every step of the optimiser W = round(W₀ + s·B·A) is
written where W lies, and whoever reads that, by a fused block or a captured graph, sees the new policy. The backward
pass gives ∂A and ∂B without ∂W (kernels/low_rank.py). Where W₀ is in few bits, nothing is merged: W₀ is made whole for
a product, no more than one layer's at a time, and the factors' own product is added.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from panoply.kernels.low_rank import Stack, Weight, back_onto, beside, matrix, onto, slopes
from panoply.policies.expert_adapters import LowRankExperts, adapt_experts, expert_tensors
from panoply.policies.quantised import FewBits, Kind, QuantisedLinear

Layer = TypeVar("Layer", nn.Linear, QuantisedLinear)


class _Product(torch.autograd.Function):
    """x · Wᵀ + bias of [N, inputs]; W lies over the merged weights of layers that share their input, or is made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, bias: Tensor | None, stack: Stack, *_: Tensor) -> Tensor:
        whole = matrix(weight)
        ctx.save_for_backward(x, whole if weight is whole else None)
        ctx.stack, ctx.made = stack, None if weight is whole else weight
        return onto(F.linear(x, whole, bias), x, beside(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, whole = ctx.saved_tensors
        weight = ctx.made if whole is None else whole
        v = g @ ctx.stack.b
        on_x = back_onto(g @ matrix(weight), v, beside(weight)) if ctx.needs_input_grad[0] else None
        return on_x, None, None, None, *slopes(x, g, v, ctx.stack)


def product(x: Tensor, weight: Weight, bias: Tensor | None, stack: Stack) -> Tensor:
    """[…, inputs] to […, outputs of all layers]; only their factors get gradients."""
    flat = x.flatten(0, -2)
    found: Tensor = _Product.apply(flat, weight, bias, stack, *stack.leaves)  # type: ignore[no-untyped-call]
    return found.view(*x.shape[:-1], -1)


class Origin(Generic[Layer]):
    """The layer as it was before adapters: W₀. It never changes, so copies of a model share it."""

    def __init__(self, layer: Layer):
        self.layer: Layer = layer

    def __deepcopy__(self, _: Mapping[int, Any]) -> Origin[Layer]:
        return self


class Places:
    """Where a layer's factors lie in stacks, and the stacks that begin with it; a copy of a model makes its own."""

    def __init__(self) -> None:
        self.own: list[tuple[Tensor, Tensor | None, Tensor]] = []
        self.stacks: dict[tuple[Any, ...], Stack] = {}

    def __deepcopy__(self, _: Mapping[int, Any]) -> Places:
        return Places()

    def follow(self, layer: LowRank) -> None:
        """Let what lies in stacks be the layer's factors of now."""
        for a, bare, b in self.own:
            a.copy_(layer.lora_A * layer.scale)
            if bare is not None:
                bare.copy_(layer.lora_A)
            b.copy_(layer.lora_B * layer.scale)


class LowRankLinear(nn.Linear):
    """A linear layer whose weight is W₀ + s·B·A, merged; A and B learn, nothing else does."""

    def __init__(self, layer: nn.Linear, origin: nn.Linear, rank: int, scale: float):
        with torch.device("meta"):
            super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight = nn.Parameter(layer.weight.detach(), requires_grad=False)
        self.bias = layer.bias
        self.origin, self.scale, self.places = Origin(origin), scale, Places()
        on: dict[str, Any] = {"dtype": _exact(layer.weight.dtype), "device": layer.weight.device}
        self.lora_A = nn.Parameter(torch.zeros(rank, layer.in_features, **on))
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank, **on))

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias, stacked([self]))

    @property
    def like(self) -> Tensor:
        """Of the dtype that products are taken in, and where."""
        return self.weight

    @torch.no_grad()
    def merge(self) -> None:
        """Let what is made of the factors follow them: round(W₀ + s·B·A) where the weight lies, and stacks."""
        self.weight.copy_(merged(self.origin.layer.weight, self.lora_A, self.lora_B, self.scale))
        self.places.follow(self)


class LowRankQuantised(nn.Module):
    """The same over W₀ in few bits, to whose product that of the factors is added."""

    def __init__(self, layer: nn.Linear, origin: QuantisedLinear, rank: int, scale: float):
        super().__init__()
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        self.origin, self.scale, self.places = Origin(origin), scale, Places()
        on: dict[str, Any] = {"dtype": _exact(layer.weight.dtype), "device": layer.weight.device}
        self.lora_A = nn.Parameter(torch.zeros(rank, layer.in_features, **on))
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, rank, **on))

    @property
    @torch.no_grad()
    def weight(self) -> Tensor:
        """round(W₀ + s·B·A), as a model without adapters has it; made whenever it is asked for."""
        start = self.origin.layer.weight
        return merged(start, self.lora_A, self.lora_B, self.scale).to(start.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, in_few_bits([self]), self.bias, stacked([self]))

    @property
    def like(self) -> Tensor:
        """Of the dtype that products are taken in, and where."""
        return self.lora_A.detach().new_empty(0, dtype=self.origin.layer.held.dtype)

    @torch.no_grad()
    def merge(self) -> None:
        self.places.follow(self)


LowRank = LowRankLinear | LowRankQuantised
Linear = nn.Linear | LowRankQuantised | QuantisedLinear
FEW = (LowRankQuantised, QuantisedLinear)
"""Types of layers whose weight is in few bits."""


def in_few_bits(layers: Sequence[Linear]) -> FewBits:
    """The weights of layers that share their input, some of them in few bits, and factors where there are any."""
    held = [_base(layer).held if isinstance(layer, FEW) else layer.weight for layer in layers]
    return FewBits(held, stacked(layers) if any(isinstance(layer, LowRank) for layer in layers) else None)


def _base(layer: LowRankQuantised | QuantisedLinear) -> QuantisedLinear:
    return layer if isinstance(layer, QuantisedLinear) else layer.origin.layer


def stacked(layers: Sequence[Linear]) -> Stack:
    """The factors of layers that share their input, of which some have any, side by side; made once."""
    adapted = [layer for layer in layers if isinstance(layer, LowRank)]
    first = adapted[0]
    key = (first.like.dtype, first.like.device, *map(id, layers))
    if key not in first.places.stacks:
        first.places.stacks[key] = _stack(layers, adapted)
    return first.places.stacks[key]


@torch.no_grad()
def _stack(layers: Sequence[Linear], adapted: Sequence[LowRank]) -> Stack:
    like, ranks = adapted[0].like, sum(len(layer.lora_A) for layer in adapted)
    a = like.new_zeros(ranks, adapted[0].in_features)
    bare = torch.zeros_like(a) if any(isinstance(layer, FEW) for layer in layers) else None
    b = like.new_zeros(sum(layer.out_features for layer in layers), ranks)
    spans, row, rank = [], 0, 0
    for layer in layers:
        if isinstance(layer, LowRank):
            outputs, own = slice(row, row + layer.out_features), slice(rank, rank + len(layer.lora_A))
            layer.places.own.append((a[own], None if bare is None else bare[own], b[outputs, own]))
            layer.places.follow(layer)
            spans.append((outputs, own))
            rank = own.stop
        row += layer.out_features
    leaves = tuple(factor for layer in adapted for factor in (layer.lora_A, layer.lora_B))
    return Stack(a, bare, b, tuple(spans), leaves)


def merged(start: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W₀ + s·B·A, in float32 or more."""
    return (b @ a).mul_(scale).add_(start)


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


PLAIN: tuple[type[nn.Module], ...] = (nn.Linear, LowRankLinear)
"""Types of layers that are no more than x · Wᵀ + bias in a forward pass; those that inherit from them may be."""


def adapters(model: object) -> Iterator[tuple[str, LowRank | LowRankExperts]]:
    """A model's layers, and tensors of experts, that have adapters, by name."""
    for name, layer in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(layer, LowRank | LowRankExperts):
            yield name.removesuffix("_factors"), layer


def merge(model: nn.Module) -> None:
    """Let the weights follow the factors, all of them, at their addresses."""
    for _, layer in adapters(model):
        layer.merge()


# ------------------------------------------------------------------ adding adapters


@torch.no_grad()
def adapt(
    model: Any,
    ranks: Mapping[str, int],
    scales: Mapping[str, float],
    quantised: Kind | None = None,
    device: torch.device | None = None,
) -> Any:
    """Give the layers named adapters of zeros, in place, and freeze all else; the model as it was before.

    That one shares every weight with the adapted one but those of adapted layers, which are W₀: it costs what W₀ costs.
    Where W₀ is quantised both have it in few bits alone, and W begins as what they say. Where a `device` is named it
    goes there a layer at a time, so that whole weights are never there together.
    """
    model.requires_grad_(False)
    tensors = {name: model.get_parameter(name) for name in ranks if name in expert_tensors(model)}
    layers = {name: model.get_submodule(name) for name in ranks if name not in tensors}
    own = {id(layer.weight) for layer in layers.values()} if quantised is None else set()
    own |= _joined(model, own) | {id(tensor) for tensor in tensors.values()}
    base = copy.deepcopy(model, {id(p): p for p in model.parameters() if id(p) not in own})
    for name in list(layers):
        layer = layers.pop(name)  # whose whole weight has gone when the next one comes
        place, _, last = name.rpartition(".")
        adapted: LowRank
        if quantised is None:
            adapted = LowRankLinear(layer, base.get_submodule(name), ranks[name], scales[name])
        else:
            few = QuantisedLinear(layer.to(device), quantised)
            setattr(base.get_submodule(place), last, few)
            adapted = LowRankQuantised(layer, few, ranks[name], scales[name])
        setattr(model.get_submodule(place), last, adapted)
    for name in tensors:
        adapt_experts(model, base, name, ranks[name], scales[name])
    model.to(device)
    return base.to(device)


def _joined(model: nn.Module, own: set[int]) -> set[int]:
    """Weights that lie in one tensor with some that a model does not share, so that it cannot share them either."""
    groups: list[Any] = [getattr(module, "inputs", None) for module in model.modules()]
    joints = [group for group in groups if isinstance(group, list)]
    ids = [{id(layer.weight) for layer in group if isinstance(layer, nn.Linear)} for group in joints]
    return {one for group in ids if group & own for one in group}


@torch.no_grad()
def start(model: nn.Module, generator: torch.Generator) -> None:
    """Factors as PEFT starts them, so that the policy is unchanged: A uniform within ±1/√inputs, and B zeros."""
    for _, layer in adapters(model):
        drawn = torch.empty(layer.lora_A.shape).uniform_(-1, 1, generator=generator)
        layer.lora_A.copy_(drawn / math.sqrt(layer.in_features))
        layer.lora_B.zero_()
        layer.merge()


@torch.no_grad()
def copied(model: Any) -> Any:
    """A copy that learning does not touch. With adapters, it shares what never changes: W₀ and all frozen weights."""
    moving = {id(p) for _, layer in adapters(model) for p in (layer.lora_A, layer.lora_B)}
    moving |= {id(la.like) for _, la in adapters(model) if not isinstance(la, LowRankQuantised)}
    moving |= _joined(model, moving)
    shared = {id(p): p for p in model.parameters() if moving and id(p) not in moving}
    return copy.deepcopy(model, shared)


def plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights by name as a model without adapters has them: merged."""
    whole = {f"{n}.weight": la.weight for n, la in adapters(model) if isinstance(la, LowRankQuantised)}
    held = model.state_dict().items()
    return {name: weight for name, weight in held if not name.endswith((".lora_A", ".lora_B"))} | whole


@torch.no_grad()
def plain(model: Any) -> Any:
    """A model of its own without adapters, which begins as this one; nothing is shared, and all of it may learn."""
    if hasattr(model, "peft_config") or hasattr(model, "inner"):
        return _plain_copy(model).requires_grad_(True).eval()
    weights = {name: weight.clone() for name, weight in plain_weights(model).items()}
    with torch.device("meta"):
        made = type(model)(model.config)
    made.load_state_dict(weights, assign=True, strict=False)
    made.tie()
    return made.requires_grad_(True).eval()


def _plain_copy(model: Any) -> Any:
    """A copy without adapters of PEFT, also of a model that transformers runs."""
    made = copy.deepcopy(model)
    if hasattr(made, "peft_config"):
        return made.merge_and_unload()
    if hasattr(made.inner, "peft_config"):
        made.inner = made.inner.merge_and_unload()
    return made


def linear_layers(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Which layers could have adapters, and the shapes of their weights."""
    return {name: tuple(m.weight.shape) for name, m in model.named_modules() if type(m) is nn.Linear}
