"""What lies between the matrix products of a block while learning, on a CPU.

The functions are those of `kernels/train.py`. Written out by hand, forward and backward, they read and write memory a
third as often as what autograd makes of the plain expressions, and on a CPU that is most of their time. With Numba
(`kernels/compiled.py`) they do so once; without it, torch's own operators serve.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from panoply.kernels.low_rank import Stack, Weight, back_onto, onto, slopes

ROWS = 384
"""So many rows at a time, what is computed between two products stays in a core's own cache."""


def compiled(like: Tensor) -> ModuleType | None:
    """The compiled kernels, for numbers they are for and where they are installed."""
    return _compiled() if like.dtype == torch.float32 and like.device.type == "cpu" else None


@functools.cache
def _compiled() -> ModuleType | None:
    if importlib.util.find_spec("numba") is None or os.environ.get("PANOPLY_COMPILED") == "0":
        return None
    try:
        from panoply.kernels import compiled
    except Exception as problem:  # a Numba that does not fit this Python or NumPy, or nowhere to cache
        warnings.warn(f"Numba is installed but cannot be used ({problem}); going on without.", stacklevel=2)
        return None
    return compiled


def array(x: Tensor | None) -> Any:
    """The tensor's memory, for a compiled kernel."""
    return None if x is None else x.detach().contiguous().numpy()


class _AddNorm(torch.autograd.Function):
    """(x + change, RMSNorm of it)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, change: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        if fast := compiled(x):
            total = x if change is None else x.new_empty(x.shape)
            normed, scale = x.new_empty(x.shape), x.new_empty(len(x), 1)
            fast.add_norm(*map(array, (x, change, weight)), eps, *map(array, (total, normed, scale.view(-1))))
        else:
            total = x if change is None else x + change
            scale = _scale(total, eps)
            normed = (total * scale).mul_(weight)
        ctx.save_for_backward(total, scale, weight)
        ctx.added = change is not None
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_total: Tensor | None, g: Tensor | None) -> Any:
        x, scale, weight = ctx.saved_tensors
        if g is None:
            return g_total, g_total if ctx.added else None, None, None
        if fast := compiled(x):
            out, on_weight = x.new_empty(x.shape), torch.zeros_like(weight)
            given = (x, scale.view(-1), weight, g, g_total, out, on_weight)
            fast.add_norm_back(*map(array, given))
            return out, out if ctx.added else None, on_weight, None
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


def add_norm(
    x: Tensor, change: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """[N, width] x + change, and its RMSNorm, times the weight plus an offset."""
    weight = weight + offset if offset else weight
    found: tuple[Tensor, Tensor] = _AddNorm.apply(x, change, weight, eps)  # type: ignore[no-untyped-call]
    return found


def column_sums(x: Tensor) -> Tensor:
    """The sum over the rows of [N, width], in at least float32."""
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


def angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """[N, size / 2] cosines and sines as `turn` wants them, [N, 1, size]."""
    return torch.cat([cos, cos], dim=-1)[:, None], torch.cat([-sin, sin], dim=-1)[:, None]


def turn(x: Tensor, heads: int, cos: Tensor, sin: Tensor, sign: float = 1.0) -> None:
    """Rotary positions on the first heads of [N, heads, size] by `angles`, forth or (sign −1) back, in place."""
    if (fast := compiled(x)) and x.is_contiguous():
        fast.turn(array(x), heads, array(cos), array(sin), sign)
        return
    turning = x[:, :heads]
    first, second = turning.chunk(2, dim=-1)
    across = torch.cat([second, first], dim=-1).mul_(sin)
    turning.mul_(cos).add_(across, alpha=sign)


class _GatedDown(torch.autograd.Function):
    """(silu(gate) · up) Wᵀ. What is between the products is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, given: Weight, stack: Stack | None, *_: Tensor) -> Tensor:
        few = None if isinstance(given, Tensor) else given
        weight = given if isinstance(given, Tensor) else given.whole()
        ctx.save_for_backward(both, weight if few is None else None)
        ctx.stack, ctx.few = stack, few
        out = both.new_empty(len(both), len(weight))
        for part, into in zip(torch.split(both, ROWS), torch.split(out, ROWS), strict=True):
            wide = gated(part)
            torch.mm(wide, weight.t(), out=into)
            if few is not None:
                onto(into, wide, few.stack)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        both, weight = ctx.saved_tensors
        weight = weight if ctx.few is None else ctx.few.whole()
        g_both, on_weight = both.new_empty(both.shape), None
        if ctx.needs_input_grad[1]:
            on_weight = torch.zeros_like(weight)
        whole = both.new_empty(len(both), weight.shape[1]) if ctx.stack else None
        v = g @ ctx.stack.b if ctx.stack else g
        for start, (part, slope, through, into) in enumerate(
            zip(*(torch.split(x, ROWS) for x in (both, g, v, g_both)), strict=True)
        ):
            on_wide = slope @ weight
            if ctx.few is not None:
                back_onto(on_wide, through, ctx.few.stack)
            wide = _gated_back(part, on_wide, into)
            if on_weight is not None:
                on_weight.addmm_(slope.t(), wide)
            if whole is not None:
                whole[start * ROWS : start * ROWS + len(wide)] = wide
        on_factors = () if whole is None else slopes(whole, g, v, ctx.stack)
        return g_both, on_weight, None, *on_factors


def gated(both: Tensor) -> Tensor:
    """silu(gate) · up of [N, 2 · inner], gates first."""
    gate, up = both.chunk(2, dim=1)
    if fast := compiled(both):
        wide = both.new_empty(gate.shape)
        fast.gated(array(both), array(wide))
        return wide
    return torch.nn.functional.silu(gate).mul_(up)


def _gated_back(both: Tensor, slope: Tensor, out: Tensor) -> Tensor:
    """The slope by `both` into `out`, from that by silu(gate) · up, which is given back."""
    gate, up = both.chunk(2, dim=1)
    if fast := compiled(both):
        wide = torch.empty_like(slope)
        fast.gated_back(*map(array, (both, slope, out, wide)))
        return wide
    share = gate.sigmoid()
    silu = gate * share
    torch.mul(slope, silu, out=out[:, gate.shape[1] :])
    # The slope of silu is share + silu · (1 − share).
    rise = torch.addcmul(silu + share, silu, share, value=-1)
    torch.mul(slope.mul_(up), rise, out=out[:, : gate.shape[1]])
    return silu.mul_(up)


def gated_down(both: Tensor, weight: Weight, stack: Stack | None = None) -> Tensor:
    """[N, 2 · inner], gates first, to [N, width]. Where the weight has low-rank factors, they get the gradient."""
    leaves = () if stack is None else stack.leaves
    found: Tensor = _GatedDown.apply(both, weight, stack, *leaves)  # type: ignore[no-untyped-call]
    return found
