"""What lies between the matrix products of a block while learning, in torch's own operators: for a CPU.

The functions are those of `kernels/train.py`. Written out by hand, forward and backward, they read and write memory a
third as often as what autograd makes of the plain expressions, and on a CPU that is most of their time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _AddNorm(torch.autograd.Function):
    """(x + change, RMSNorm of it)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, change: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x if change is None else x + change
        scale = _scale(total, eps)
        ctx.save_for_backward(total, scale, weight)
        ctx.added = change is not None
        ctx.set_materialize_grads(False)
        return total, (total * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_total: Tensor | None, g: Tensor | None) -> Any:
        x, scale, weight = ctx.saved_tensors
        if g is None:
            return g_total, g_total if ctx.added else None, None, None
        normed = x * scale
        along = g * normed
        on_weight = along.sum(0)
        share = (along @ weight).div_(x.shape[-1])[:, None]
        out = (g * weight).addcmul_(normed, share, value=-1).mul_(scale)
        if g_total is not None:
            out += g_total
        return out, out if ctx.added else None, on_weight, None


def _scale(x: Tensor, eps: float) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def add_norm(x: Tensor, change: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[N, width] x + change, and its RMSNorm."""
    found: tuple[Tensor, Tensor] = _AddNorm.apply(x, change, weight, eps)  # type: ignore[no-untyped-call]
    return found


def angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[N, size / 2] cosines and sines as `turn` wants them, [N, 1, size]."""
    return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]


def turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: float = 1.0) -> None:
    """Rotary positions on [N, heads, size] by `angles`, forth or (sign −1) back, into `out`."""
    first, second = x.chunk(2, dim=-1)
    across = torch.cat([second, first], dim=-1).mul_(sin)
    torch.mul(x, cos, out=out).add_(across, alpha=sign)


class _GatedDown(torch.autograd.Function):
    """(silu(gate) · up) Wᵀ."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, weight: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=1)
        share = gate.sigmoid()
        silu = gate * share
        wide = silu * up
        ctx.save_for_backward(up, share, silu, wide, weight)
        return wide @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        up, share, silu, wide, weight = ctx.saved_tensors
        slope, inner = g @ weight, up.shape[1]
        g_both = slope.new_empty(len(slope), 2 * inner)
        torch.mul(slope, silu, out=g_both[:, inner:])
        # The slope of silu is share + silu · (1 − share).
        rise = torch.addcmul(silu + share, silu, share, value=-1)
        torch.mul(slope.mul_(up), rise, out=g_both[:, :inner])
        return g_both, g.t() @ wide


def gated_down(both: Tensor, weight: Tensor) -> Tensor:
    """[N, 2 · inner], gates first, to [N, width]."""
    found: Tensor = _GatedDown.apply(both, weight)  # type: ignore[no-untyped-call]
    return found
