"""Mixtures of experts: a router sends each token through a few of many feed-forward layers.

Logits z = W x in float32, the k largest of them chosen; a choice's weight is softmax(z) over the chosen alone
(`normalised`) or over all, and y = Σ_chosen weight · expert(x). Gradients reach the router through the weights of what
was chosen; there is no auxiliary loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from panoply.errors import PanoplyError
from panoply.kernels import host_experts
from panoply.policies.architectures import Architecture
from panoply.policies.scoring import has_triton


@dataclass(frozen=True)
class Mixing:
    """How a model's sparse layers mix."""

    experts: int
    chosen: int
    """How many a token goes through."""
    inner: int
    """Width of one expert."""
    normalised: bool = True
    """Whether the weights of a token's chosen experts sum to 1."""
    bias: bool = False
    """On the router and in the experts."""
    alpha: float = 1.0
    limit: float = 0.0
    """An expert's activation is gate · σ(alpha · gate) · up; with a limit both are clamped to it, and up is up + 1."""


class Router(nn.Module):
    def __init__(self, width: int, mixing: Mixing):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(mixing.experts, width))
        self.bias = nn.Parameter(torch.empty(mixing.experts)) if mixing.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Logits, in float32 at least: half precision would choose others for a tie that is none."""
        wide = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        return nn.functional.linear(x.to(wide), self.weight.to(wide), bias)


TENSORS = ("gate_up_proj", "down_proj")
"""Of experts' weights, which may have adapters (`expert_adapters.py`); their factors are modules beside them."""


class Experts(nn.Module):
    """All experts' weights, [experts, outputs, inputs]; of the first product the gates come first."""

    def __init__(self, width: int, mixing: Mixing):
        super().__init__()
        many, inner = mixing.experts, mixing.inner
        self.gate_up_proj = nn.Parameter(torch.empty(many, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(many, width, inner))
        self.gate_up_bias = nn.Parameter(torch.empty(many, 2 * inner)) if mixing.bias else None
        self.down_bias = nn.Parameter(torch.empty(many, width)) if mixing.bias else None

    @property
    def factors(self) -> list[Any]:
        """The adapters of both tensors, None where there is none."""
        return [getattr(self, f"{tensor}_factors", None) for tensor in TENSORS]


class Mixture(nn.Module):
    """A sparse layer, in the place of `FeedForward`."""

    def __init__(self, width: int, mixing: Mixing):
        super().__init__()
        self.mixing = mixing
        self.router, self.experts = Router(width, mixing), Experts(width, mixing)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scale, chosen = route(self.router(flat), self.mixing)
        e = self.experts
        leaves = [leaf for one in e.factors if one is not None for leaf in (one.lora_A, one.lora_B)]
        weights = (e.gate_up_proj, e.gate_up_bias, e.down_proj, e.down_bias)
        mixed: Tensor = _Mix.apply(  # type: ignore[no-untyped-call]
            flat, scale, chosen, self.mixing, *weights, e.factors, *leaves
        )
        return mixed.view(x.shape)

    def decode(self, x: Tensor, table: Any) -> Tensor:
        """[chosen, N, width] parts of the sum of few tokens on a GPU, in fixed shapes; `table` is the plan's room."""
        from panoply.kernels.experts import choose, gated, product
        from panoply.policies.scoring import wide_product

        m, e, pairs = self.mixing, self.experts, self.mixing.chosen * len(x)
        logits = wide_product(x, self.router.weight.t())
        if self.router.bias is not None:
            logits = logits + self.router.bias
        scale, plan = choose(logits, m.chosen, m.normalised, table)
        both = product(x, e.gate_up_proj, e.gate_up_bias, plan, pairs, few=True)
        wide = gated(both, scale, m.alpha, m.limit, few=True)
        out: Tensor = product(wide, e.down_proj, e.down_bias, plan, pairs, scale, few=True)
        return out.view(m.chosen, *x.shape)


def route(logits: Tensor, mixing: Mixing) -> tuple[Tensor, Tensor]:
    """Weights and experts of [N, experts] logits, [chosen, N] each, the heaviest first."""
    top, chosen = logits.topk(mixing.chosen, dim=1)
    scale = top.softmax(1) if mixing.normalised else (top - logits.logsumexp(1, keepdim=True)).exp()
    return scale.t().contiguous(), chosen.t().contiguous()


def _kernels(device: torch.device) -> ModuleType:
    if device.type == "cpu" or not has_triton():
        return host_experts
    return import_module("panoply.kernels.experts")


class _Mix(torch.autograd.Function):
    """y = Σ_j D_e (s_j · act(U_e x)) + s_j · d_e, where s is a pair's weight and U, D, d its expert's.

    The weight stands before the last product, so that its slope needs no output of it, and what lies between the
    products is computed again in the backward pass, as in `_GatedDown`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        chosen: Tensor,
        mixing: Mixing,
        up: Tensor,
        up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        factors: list[Any],
        *_: Tensor,
    ) -> Tensor:
        kernels = _kernels(x.device)
        plan, pairs = kernels.plan(chosen, mixing.experts), chosen.numel()
        both = kernels.product(x, up, up_bias, plan, pairs)
        wide = kernels.gated(both, scale.view(-1), mixing.alpha, mixing.limit)
        parts = kernels.product(wide, down, down_bias, plan, pairs, scale.view(-1))
        ctx.save_for_backward(x, scale, chosen, up, up_bias, down, down_bias, both)
        ctx.plan, ctx.mixing, ctx.factors = plan, mixing, factors
        out: Tensor = parts.view(mixing.chosen, *x.shape).sum(0)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, scale, chosen, up, up_bias, down, down_bias, both = ctx.saved_tensors
        kernels, plan, mixing, pairs = _kernels(x.device), ctx.plan, ctx.mixing, chosen.numel()
        needs, g = ctx.needs_input_grad, g.contiguous()
        steep = kernels.product(g, down.transpose(1, 2), None, plan, pairs)
        wide, g_both, g_scale = kernels.gated_back(both, scale.view(-1), steep, mixing.alpha, mixing.limit)
        del steep
        g_scale = g_scale.view_as(scale)
        on_down = kernels.slope(g, wide, plan, down) if needs[6] else None
        on_up = kernels.slope(g_both, x, plan, up) if needs[4] else None
        on_up_bias = on_down_bias = None
        if down_bias is not None:
            wide_g = g.to(scale.dtype)
            g_scale += torch.stack([(wide_g * down_bias[row].to(scale.dtype)).sum(1) for row in chosen])
            if needs[7]:
                on_down_bias = _summed(torch.cat([s[:, None] * wide_g for s in scale]), chosen, down_bias)
            on_up_bias = _summed(g_both, chosen, up_bias) if needs[5] else None
        on_leaves: list[Tensor] = []
        for one, slope, given in zip(ctx.factors, (g_both, g), (x, wide), strict=True):
            on_leaves += [] if one is None else one.slopes(slope, given, plan, pairs, kernels)
        on_x = (
            kernels.product(g_both, up.transpose(1, 2), None, plan, pairs)
            .view(mixing.chosen, *x.shape)
            .sum(0)
        )
        return on_x, g_scale, None, None, on_up, on_up_bias, on_down, on_down_bias, None, *on_leaves


def _summed(g: Tensor, chosen: Tensor, like: Tensor) -> Tensor:
    """Each expert's sum of its pairs' rows."""
    wide = torch.promote_types(g.dtype, torch.float32)
    total = torch.zeros(like.shape, dtype=wide, device=g.device)
    return total.index_add_(0, chosen.flatten(), g.to(wide)).to(like.dtype)


# ------------------------------------------------------------------ config.json


def mixing_of(raw: Mapping[str, Any], layout: Architecture) -> Mixing | None:
    """What a `config.json` says of its experts; releases of transformers call their number differently."""
    sparse = layout.sparse
    if sparse is None:
        return None

    def first(*names: str) -> Any:
        found = (given[n] for given in (raw, layout.defaults) for n in names if given.get(n) is not None)
        return next(found, None)

    if raw.get("router_jitter_noise"):
        raise PanoplyError("A router that is given noise (router_jitter_noise) is not supported.")
    clamp: dict[str, Any] = {}
    if sparse.clamped:
        clamp = {"bias": True, "alpha": float(first("swiglu_alpha")), "limit": float(first("swiglu_limit"))}
    return Mixing(
        experts=first("num_local_experts", "num_experts"),
        chosen=first("num_experts_per_tok", "experts_per_token"),
        inner=first(sparse.inner),
        normalised=bool(raw.get("norm_topk_prob")) if sparse.normalised is None else sparse.normalised,
        **clamp,
    )


def dense_of(raw: Mapping[str, Any], layout: Architecture, layers: int) -> tuple[int, ...]:
    """The layers of a layout with experts that have none."""
    if layout.sparse is None:
        return ()
    listed, step = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step") or 1
    return tuple(i for i in range(layers) if i in listed or (i + 1) % step)


def described(mixing: Mixing | None, dense: tuple[int, ...], layout: Architecture) -> dict[str, Any]:
    """Both as a `config.json` says them."""
    if mixing is None or layout.sparse is None:
        return {}
    found: dict[str, Any] = {
        "num_experts": mixing.experts,
        "num_local_experts": mixing.experts,
        "num_experts_per_tok": mixing.chosen,
        layout.sparse.inner: mixing.inner,
    }
    if layout.sparse.normalised is None:
        found["norm_topk_prob"] = mixing.normalised
    if layout.sparse.clamped:
        found |= {"swiglu_alpha": mixing.alpha, "swiglu_limit": mixing.limit}
    if layout.sparse.inner != "intermediate_size":
        found |= {"mlp_only_layers": list(dense), "decoder_sparse_step": 1}
    return found


def check_mixing(
    mixing: Mixing | None, dense: tuple[int, ...], layers: int, model_type: str, layout: Architecture
) -> None:
    """Refuse what the layout does not have, and choices there are not enough experts for."""
    if mixing is None:
        if layout.sparse is not None or dense:
            raise PanoplyError(
                f"A {model_type} layout needs `mixing`: how many experts it has, and how wide they are."
            )
        return
    if layout.sparse is None:
        raise PanoplyError(f"The {model_type} layout has no experts; use qwen3_moe.")
    if not 1 <= mixing.chosen <= mixing.experts:
        raise PanoplyError(f"A token cannot go through {mixing.chosen} of {mixing.experts} experts.")
    if dense and layout.sparse.inner == "intermediate_size":
        raise PanoplyError(f"All layers of the {model_type} layout have experts; use qwen3_moe.")
    if bad := [i for i in dense if not 0 <= i < layers]:
        raise PanoplyError(f"There is no layer {bad[0]} among {layers} to be without experts.")
