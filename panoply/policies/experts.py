"""Mixtures of experts: a router sends each token through a few of many feed-forward layers.

Logits z = W x in float32, the k largest of them chosen; a choice's weight is softmax(z) over the chosen alone
(`normalised`) or over all, and y = Σ_chosen weight · expert(x). Gradients reach the router through the weights of what
was chosen; there is no auxiliary loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from panoply.kernels import host_experts


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


class Experts(nn.Module):
    """All experts' weights, [experts, outputs, inputs]; of the first product the gates come first."""

    def __init__(self, width: int, mixing: Mixing):
        super().__init__()
        many, inner = mixing.experts, mixing.inner
        self.gate_up_proj = nn.Parameter(torch.empty(many, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(many, width, inner))
        self.gate_up_bias = nn.Parameter(torch.empty(many, 2 * inner)) if mixing.bias else None
        self.down_bias = nn.Parameter(torch.empty(many, width)) if mixing.bias else None


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
        mixed: Tensor = _Mix.apply(  # type: ignore[no-untyped-call]
            flat, scale, chosen, self.mixing, e.gate_up_proj, e.gate_up_bias, e.down_proj, e.down_bias
        )
        return mixed.view(x.shape)


def route(logits: Tensor, mixing: Mixing) -> tuple[Tensor, Tensor]:
    """Weights and experts of [N, experts] logits, [chosen, N] each, the heaviest first."""
    top, chosen = logits.topk(mixing.chosen, dim=1)
    scale = top.softmax(1) if mixing.normalised else (top - logits.logsumexp(1, keepdim=True)).exp()
    return scale.t().contiguous(), chosen.t().contiguous()


def _kernels(device: torch.device) -> ModuleType:
    return host_experts if device.type == "cpu" else import_module("panoply.kernels.experts")


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
    ) -> Tensor:
        kernels = _kernels(x.device)
        plan, pairs = kernels.plan(chosen, mixing.experts), chosen.numel()
        both = kernels.product(x, up, up_bias, plan, pairs)
        wide = kernels.gated(both, scale.view(-1), mixing.alpha, mixing.limit)
        out: Tensor = kernels.product(wide, down, None, plan, pairs).view(mixing.chosen, *x.shape).sum(0)
        if down_bias is not None:
            out += offset(scale, chosen, down_bias)
        ctx.save_for_backward(x, scale, chosen, up, up_bias, down, down_bias, both)
        ctx.plan, ctx.mixing = plan, mixing
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
            on_down_bias = _summed(torch.cat([s[:, None] * wide_g for s in scale]), chosen, down_bias)
            on_up_bias = _summed(g_both, chosen, up_bias)
        on_x = (
            kernels.product(g_both, up.transpose(1, 2), None, plan, pairs)
            .view(mixing.chosen, *x.shape)
            .sum(0)
        )
        return on_x, g_scale, None, None, on_up, on_up_bias, on_down, on_down_bias


def offset(scale: Tensor, chosen: Tensor, bias: Tensor) -> Tensor:
    """Σ_j s_j · d_e, in `bias`'s dtype."""
    mixed = (bias[chosen].to(scale.dtype) * scale[..., None]).sum(0)
    return mixed.to(bias.dtype)


def _summed(g: Tensor, chosen: Tensor, like: Tensor) -> Tensor:
    """Each expert's sum of its pairs' rows."""
    wide = torch.promote_types(g.dtype, torch.float32)
    total = torch.zeros(like.shape, dtype=wide, device=g.device)
    return total.index_add_(0, chosen.flatten(), g.to(wide)).to(like.dtype)
