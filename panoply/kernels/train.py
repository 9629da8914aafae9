"""What lies between the matrix products of a block while learning, forward and backward, each in one kernel."""
# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from panoply.kernels.decode import _add_norm, gated
from panoply.kernels.low_rank import Factors, slopes


@triton.jit(do_not_specialize=["rows"])
def _norm_back(x, weight, g, more, out, partial, rows, width, eps, MORE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows in strides; each program sums the weight's gradient over its own."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        at = row * width + column
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + eps)
        normed = value * scale
        total += slope * normed
        slope = slope * gain
        back = scale * (slope - normed * (tl.sum(slope * normed, axis=0) / width))
        if MORE:
            back += tl.load(more + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, back.to(out.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(0) * width + column, total, mask=inside)


class _AddNorm(torch.autograd.Function):
    """(x + change, RMSNorm of it)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, change: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        rows, width = x.shape
        total, added = (x, x) if change is None else (torch.empty_like(x), change)
        normed = torch.empty_like(x)
        block = triton.next_power_of_2(width)
        warps = 4 if block <= 2048 else 8
        _add_norm[(rows,)](
            x, added, total, weight, normed, rows, width, eps, change is not None, 1, False, block,
            num_warps=warps,
        )  # fmt: skip
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.added = eps, change is not None
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_total: Tensor | None, g: Tensor | None) -> Any:
        x, weight = ctx.saved_tensors
        if g is None:
            return g_total, g_total if ctx.added else None, None, None
        rows, width = x.shape
        programs = min(rows, 1024)
        out, partial = torch.empty_like(x), torch.empty(programs, width, dtype=torch.float32, device=x.device)
        more = g if g_total is None else g_total.contiguous()
        block = triton.next_power_of_2(width)
        _norm_back[(programs,)](
            x, weight, g.contiguous(), more, out, partial, rows, width, ctx.eps, g_total is not None, block,
            num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
        return out, out if ctx.added else None, partial.sum(0).to(weight.dtype), None


def add_norm(x: Tensor, change: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[N, width] x + change, and its RMSNorm."""
    found: tuple[Tensor, Tensor] = _AddNorm.apply(x, change, weight, eps)
    return found


@triton.jit
def _turn(
    x, x_stride, cos, sin, out, out_stride, sign, heads, D: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    row, head, column = (
        tl.program_id(0).to(tl.int64),
        tl.arange(0, PAD)[:, None],
        tl.arange(0, D // 2)[None, :],
    )
    here = head < heads
    cosine = tl.load(cos + row * (D // 2) + column).to(tl.float32)
    sine = tl.load(sin + row * (D // 2) + column).to(tl.float32) * sign
    at = head * D + column
    first = tl.load(x + row * x_stride + at, mask=here, other=0.0).to(tl.float32)
    second = tl.load(x + row * x_stride + at + D // 2, mask=here, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    to = out + row * out_stride + at
    tl.store(to, (first * cosine - second * sine).to(kind), mask=here)
    tl.store(to + D // 2, (second * cosine + first * sine).to(kind), mask=here)


def turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: float = 1.0) -> None:
    """Rotary positions on [N, heads, size] by [N, size / 2] angles, forth or (sign −1) back, into `out`."""
    rows, heads, size = x.shape
    pad = triton.next_power_of_2(heads)
    _turn[(rows,)](x, x.stride(0), cos, sin, out, out.stride(0), sign, heads, size, pad, num_warps=2)


@triton.jit
def _gate_back(both, g, out, g_both, inner, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    at, narrow = row * 2 * inner + column, row * inner + column
    x = tl.load(both + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(both + at + inner, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(g + narrow, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-x))
    silu = x * share
    kind = out.dtype.element_ty
    tl.store(out + narrow, (silu * y).to(kind), mask=inside)
    tl.store(g_both + at + inner, (slope * silu).to(kind), mask=inside)
    tl.store(g_both + at, (slope * y * share * (1.0 + x * (1.0 - share))).to(kind), mask=inside)


class _GatedDown(torch.autograd.Function):
    """(silu(gate) · up) Wᵀ. The product in brackets, the widest tensor of a block, is computed again, not kept."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, weight: Tensor, scale: float, *pair: Tensor) -> Tensor:
        ctx.save_for_backward(both, weight, *pair)
        ctx.scale = scale
        return gated(both) @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        both, weight, *pair = ctx.saved_tensors
        slope = g @ weight
        wide, g_both = torch.empty_like(slope), torch.empty_like(both)
        rows, inner = slope.shape
        _gate_back[(rows, triton.cdiv(inner, 1024))](both, slope, wide, g_both, inner, 1024, num_warps=4)
        on_weight = g.t() @ wide if ctx.needs_input_grad[1] else None
        on_factors = slopes(wide, g, [Factors(pair[0], pair[1], ctx.scale)]) if pair else ()
        return g_both, on_weight, None, *on_factors


def gated_down(both: Tensor, weight: Tensor, factors: Factors | None = None) -> Tensor:
    """[N, 2 · inner], gates first, to [N, width]. Where the weight has low-rank `factors`, they get the gradient."""
    learned = (1.0,) if factors is None else (factors.scale, factors.a, factors.b)
    found: Tensor = _GatedDown.apply(both, weight, *learned)
    return found
