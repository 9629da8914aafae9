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

from panoply.kernels.decode import _add_norm, gated, gelu_parts
from panoply.kernels.launching import Often, parts_of, power_above
from panoply.kernels.low_rank import Stack, Weight, back_onto, beside, linear, matrix, onto, slopes
from panoply.kernels.summing import sum_product, sums_of


@triton.jit(do_not_specialize=["rows"])
def _norm_back(
    x, weight, g, more, out, partial, rows, width, eps, offset, MORE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rows in strides; each program sums the weight's gradient over its own."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
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


_ADD_NORM, _NORM_BACK = Often(_add_norm), Often(_norm_back)


def _added(
    x: Tensor, change: Tensor | None, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    total, added = (x, x) if change is None else (torch.empty_like(x), change)
    normed = torch.empty_like(x)
    block = power_above(width)
    warps = 4 if block <= 2048 else 8
    _ADD_NORM(
        (rows,), (x.dtype, weight.dtype, x.device, width, change is not None),
        x, added, total, x, weight, normed, rows, width, eps, offset, 1.0, change is not None, 1, False, True, False,
        block, num_warps=warps,
    )  # fmt: skip
    return total, normed


class _AddNorm(torch.autograd.Function):
    """(x + change, RMSNorm of it)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, change: Tensor | None, weight: Tensor, eps: float, offset: float
    ) -> tuple[Tensor, Tensor]:
        total, normed = _added(x, change, weight, eps, offset)
        ctx.save_for_backward(total, weight)
        ctx.sums = sums_of([weight])
        ctx.eps, ctx.offset, ctx.added = eps, offset, change is not None
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_total: Tensor | None, g: Tensor | None) -> Any:
        x, weight = ctx.saved_tensors
        if g is None:
            return g_total, g_total if ctx.added else None, None, None, None
        rows, width = x.shape
        programs = min(rows, 512)
        out, partial = torch.empty_like(x), torch.empty(programs, width, dtype=torch.float32, device=x.device)
        more = g if g_total is None else g_total.contiguous()
        block = power_above(width)
        _NORM_BACK(
            (programs,), (x.dtype, weight.dtype, x.device, width, g_total is not None),
            x, weight, g.contiguous(), more, out, partial, rows, width, ctx.eps, ctx.offset, g_total is not None,
            block, num_warps=8,
        )  # fmt: skip
        on_weight = None
        if ctx.sums is not None:
            ctx.sums[0].total = folded(partial, ctx.sums[0].total)
        else:
            on_weight = folded(partial).to(weight.dtype)
        return out, out if ctx.added else None, on_weight, None, None


def add_norm(
    x: Tensor, change: Tensor | None, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """[N, width] x + change, and its RMSNorm, times the weight plus an offset."""
    if not torch.is_grad_enabled():
        return _added(x, change, weight, eps, offset)
    found: tuple[Tensor, Tensor] = _AddNorm.apply(x, change, weight, eps, offset)
    return found


@triton.jit(do_not_specialize=["rows"])
def _fold(partial, total, rows, width, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for low in range(0, rows, ROWS):
        row = low + tl.arange(0, ROWS)
        at = row[:, None] * width + column[None, :]
        found += tl.load(partial + at, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
    whole = tl.sum(found, axis=0)
    if ADD:
        whole += tl.load(total + column, mask=inside, other=0.0)
    tl.store(total + column, whole, mask=inside)


_FOLD = Often(_fold)


def folded(partial: Tensor, onto: Tensor | None = None) -> Tensor:
    """The sum over the rows of [few, width] float32; added to another where there is one, which is given back."""
    rows, width = partial.shape
    total = torch.empty(width, device=partial.device) if onto is None else onto
    _FOLD(
        (parts_of(width, 32),), (partial.device, width, onto is None), partial, total, rows, width, onto is not None,
        64, 32, num_warps=4,
    )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["rows"])
def _column_sums(x, partial, rows, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for low in range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS):
        row = low + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * width + column[None, :]
        total += tl.load(x + at, mask=(row < rows)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    tl.store(partial + tl.program_id(1) * width + column, tl.sum(total, axis=0), mask=inside)


_COLUMN_SUMS = Often(_column_sums)


def column_sums(x: Tensor) -> Tensor:
    """The sum over the rows of [N, width], in float32."""
    (rows, width), x = x.shape, x.contiguous()
    programs = min(64, parts_of(rows, 32))
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    grid = (parts_of(width, 128), programs)
    _COLUMN_SUMS(grid, (x.dtype, x.device, width), x, partial, rows, width, 32, 128, num_warps=4)
    return folded(partial)


@triton.jit
def _turn(
    x, x_stride, cos, sin, out, out_stride, sign, heads, D: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr,
    PAD: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr, STILL: tl.constexpr,
):  # fmt: skip
    """Pair i of HALF is of the columns i · STEP and i · STEP + APART; STILL columns (padded) come after all pairs."""
    row, head, pair = (
        tl.program_id(0).to(tl.int64),
        tl.arange(0, PAD)[:, None],
        tl.arange(0, WIDE)[None, :],
    )
    here, real = head < heads, pair < HALF
    cosine = tl.load(cos + row * HALF + pair, mask=real, other=0.0).to(tl.float32)
    sine = tl.load(sin + row * HALF + pair, mask=real, other=0.0).to(tl.float32) * sign
    at = head * D + pair * STEP
    first = tl.load(x + row * x_stride + at, mask=here & real, other=0.0).to(tl.float32)
    second = tl.load(x + row * x_stride + at + APART, mask=here & real, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    to = out + row * out_stride + at
    tl.store(to, (first * cosine - second * sine).to(kind), mask=here & real)
    tl.store(to + APART, (second * cosine + first * sine).to(kind), mask=here & real)
    if STILL > 0:
        rest = 2 * HALF + tl.arange(0, STILL)[None, :]
        there = here & (rest < D)
        kept = tl.load(x + row * x_stride + head * D + rest, mask=there, other=0.0)
        tl.store(out + row * out_stride + head * D + rest, kept.to(kind), mask=there)


_TURN = Often(_turn)


def turn(
    x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: float = 1.0, interleaved: bool = False
) -> None:
    """Rotary positions on [N, heads, size] by [N, pairs] angles, forth or (sign −1) back, into `out`.

    Pairs lie half of what is turned apart, or side by side where they are interleaved.
    """
    (rows, heads, size), half = x.shape, cos.shape[1]
    pad, still = power_above(heads), size - 2 * half
    step, apart = (2, 1) if interleaved else (1, half)
    rest = power_above(still) if still and x.data_ptr() != out.data_ptr() else 0
    shape = size, half, power_above(half), pad, step, apart, rest
    strides = x.stride(0), out.stride(0)
    _TURN(
        (rows,), (x.dtype, cos.dtype, x.device, heads, *shape, *strides),
        x, strides[0], cos, sin, out, strides[1], sign, heads, *shape, num_warps=2,
    )  # fmt: skip


@triton.jit
def _gather(
    d_k, d_v, stride, places, bounds, out, out_stride, width, size, SHARE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < width
    first = column // size * SHARE * size + column % size
    keys, values = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for index in range(tl.load(bounds + row), tl.load(bounds + row + 1)):
        at = tl.load(places + index).to(tl.int64) * stride + first
        for member in tl.static_range(SHARE):
            keys += tl.load(d_k + at + member * size, mask=inside, other=0.0).to(tl.float32)
            values += tl.load(d_v + at + member * size, mask=inside, other=0.0).to(tl.float32)
    to = out + row.to(tl.int64) * out_stride + column
    tl.store(to, keys.to(out.dtype.element_ty), mask=inside)
    tl.store(to + width, values.to(out.dtype.element_ty), mask=inside)


_GATHER = Often(_gather)


def gather(d_k: Tensor, d_v: Tensor, places: Tensor, bounds: Tensor, out: Tensor) -> None:
    """Slopes of listed keys and values back to tokens, [N, 2 · kv_heads, size] `out`: a token's are summed in float32.

    Of token i those at `places[bounds[i] : bounds[i + 1]]` are, of a prefix's as many as it has suffixes and one more.
    Where they are of more heads than there are keys, those of heads that share one are summed as well.
    """
    d_k, d_v = d_k.contiguous(), d_v.contiguous()
    (heads, size), width = d_k.shape[1:], out[0].numel() // 2
    share = heads * size // width
    _GATHER(
        (len(out),), (d_k.dtype, out.dtype, out.device, heads, size, width, out.stride(0)),
        d_k, d_v, heads * size, places, bounds, out, out.stride(0), width, size, share, power_above(width), num_warps=1,
    )  # fmt: skip


@triton.jit
def _gate_back(both, g, out, g_both, inner, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    at, narrow = row * 2 * inner + column, row * inner + column
    x = tl.load(both + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(both + at + inner, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(g + narrow, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        share, rise = gelu_parts(x)
        bent = share + x * rise
    else:
        share = 1.0 / (1.0 + tl.exp(-x))
        bent = share * (1.0 + x * (1.0 - share))
    gate = x * share
    kind = out.dtype.element_ty
    tl.store(out + narrow, (gate * y).to(kind), mask=inside)
    tl.store(g_both + at + inner, (slope * gate).to(kind), mask=inside)
    tl.store(g_both + at, (slope * y * bent).to(kind), mask=inside)


_GATE_BACK = Often(_gate_back)


class _GatedDown(torch.autograd.Function):
    """(act(gate) · up) Wᵀ. The product in brackets, the widest tensor of a block, is computed again, not kept."""

    @staticmethod
    def forward(
        ctx: Any, both: Tensor, weight: Weight, gelu: bool, stack: Stack | None, *_: Tensor
    ) -> Tensor:
        whole, wide = matrix(weight), gated(both, gelu)
        ctx.save_for_backward(both, whole if weight is whole else None)
        ctx.gelu, ctx.stack, ctx.made = gelu, stack, None if weight is whole else weight
        ctx.sums = sums_of([whole]) if ctx.needs_input_grad[1] else None
        return onto(wide @ whole.t(), wide, beside(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        both, whole = ctx.saved_tensors
        weight = ctx.made if whole is None else whole
        v = g @ ctx.stack.b if ctx.stack else g
        slope = back_onto(g @ matrix(weight), v, beside(weight))
        wide, g_both = torch.empty_like(slope), torch.empty_like(both)
        rows, inner = slope.shape
        grid = (rows, parts_of(inner, 1024))
        kind = (both.dtype, both.device, inner, ctx.gelu)
        _GATE_BACK(grid, kind, both, slope, wide, g_both, inner, ctx.gelu, 1024, num_warps=4)
        on_weight = None
        if ctx.sums is not None:
            sum_product(ctx.sums, g.t(), wide)
        elif ctx.needs_input_grad[1]:
            on_weight = g.t() @ wide
        on_factors = slopes(wide, g, v, ctx.stack) if ctx.stack else ()
        return g_both, on_weight, None, None, *on_factors


def gated_down(both: Tensor, weight: Weight, stack: Stack | None = None, gelu: bool = False) -> Tensor:
    """[N, 2 · inner], gates first, to [N, width]; gates go through silu, or gelu's approximation.

    Where the weight has low-rank factors, they get the gradient.
    """
    if not torch.is_grad_enabled():
        return linear(gated(both, gelu), weight, None)
    leaves = () if stack is None else stack.leaves
    found: Tensor = _GatedDown.apply(both, weight, gelu, stack, *leaves)
    return found
