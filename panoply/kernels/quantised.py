"""Weights of few bits: made whole in one pass over memory, or multiplied with as they lie, a tile at a time.

A byte of four-bit codes holds a weight of one block and, in its lower half, that of the next at the same place: both
halves of a tile lie side by side in memory, and each has one scale a row.
"""
# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from panoply.kernels.decode import begin, chained
from panoply.kernels.launching import Often, parts_of, power_above
from panoply.lora import BLOCK, PAIR

if TYPE_CHECKING:
    from panoply.kernels.low_rank import Stack

PAIRS = 32
"""Pairs of blocks that a program of `restore` makes whole."""
ROWS = 256
"""The most rows that are multiplied with codes; with more of them it is quicker to make the weights whole once."""
TILE, SPAN = (64, 4, 3), 1024
"""Outputs of a program of `few_product`, its warps, and loads under way; inputs of a program of `_factor`."""
PARTS, AT_ONCE = 8, 264
"""The most parts of a product's depth, and how many programs are wanted: two a multiprocessor of an H200."""


FACTOR_ROWS = 16
"""Rows of a program of `_factor`: there are few of them, and all of a product waits for the last."""
RANKS = 128
"""Numbers of a factor that a program holds at a time: more, with those under way, take more than 99 KB."""
COMPILED = isinstance(begin, triton.JITFunction)
"""Whether kernels are, and may have PTX in them; Triton's interpreter has none."""


class Codes(NamedTuple):
    """A matrix in few bits, whose rows begin with a pair of blocks."""

    codes: Tensor
    scales: Tensor
    levels: Tensor | None
    """The numbers that codes of four bits stand for, before their scale; other codes are these numbers themselves."""


@triton.jit
def _spread(levels, ASM: tl.constexpr):
    """The 16 levels in a warp's lanes, one in each, and twice over; without PTX, where they lie."""
    if not ASM:
        return levels
    return tl.inline_asm_elementwise(
        """{ .reg .u32 lane; .reg .u64 at;
        mov.u32 lane, %laneid; and.b32 lane, lane, 15;
        mad.wide.u32 at, lane, 4, $1; ld.global.nc.f32 $0, [at]; }""",
        "=f,l", [levels.to(tl.int64, bitcast=True)], dtype=tl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _share(code, spread, FOUR: tl.constexpr, ASM: tl.constexpr):
    """What a code stands for, before its scale: for a level the lane is asked that has it.

    A load would do, but Triton lets loads of levels wait in line with those of codes, and copies each level through
    shared memory; and loads by PTX take a quarter more time.
    """
    if not FOUR:
        return code.to(tl.float32)
    if not ASM:
        return tl.load(spread + code)
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $2, $1, 31, 0xffffffff;",
        "=f,r,f", [code, spread], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _restore(
    codes, scales, levels, out, count,
    FOUR: tl.constexpr, ASM: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    pair = (tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)).to(tl.int64)[:, None]
    place, spread = tl.arange(0, BLOCK)[None, :], levels
    if FOUR:
        spread = _spread(levels, ASM)
    for half in tl.static_range(2):
        at = (2 * pair + half) * BLOCK + place
        inside = at < count
        if FOUR:
            code = tl.load(codes + pair * BLOCK + place, mask=inside, other=0).to(tl.int32)
            code = (code >> 4) if half == 0 else (code & 15)
        else:
            code = tl.load(codes + at, mask=inside, other=0)
        scale = tl.load(scales + 2 * pair + half, mask=(2 * pair + half) * BLOCK < count, other=0.0)
        tl.store(out + at, (_share(code, spread, FOUR, ASM) * scale).to(out.dtype.element_ty), mask=inside)


_RESTORE = Often(_restore)


def restore(weights: Codes, out: Tensor) -> None:
    """Write level · scale of all weights into `out`, whose numbers lie one after another."""
    codes, scales, levels = weights
    count, four = out.numel(), levels is not None
    _RESTORE(
        (parts_of(count, PAIRS * PAIR),), (out.dtype, out.device, count, four),
        codes, scales, levels if four else codes, out, count, four, COMPILED, BLOCK, PAIRS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _factor(
    x, a, out, rows, rank, INPUTS: tl.constexpr, SPAN: tl.constexpr, RANK: tl.constexpr, EXACT: tl.constexpr,
    CHAIN: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    begin(CHAIN)
    part, row, one = tl.program_id(0), tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, RANK)
    total = tl.zeros([M, RANK], tl.float32)
    for low in range(0, SPAN, K):
        depth = part * SPAN + low + tl.arange(0, K)
        there = depth < INPUTS
        left = tl.load(
            x + row[:, None] * INPUTS + depth[None, :], mask=(row < rows)[:, None] & there[None, :], other=0.0
        )
        right = tl.load(
            a + one[None, :] * INPUTS + depth[:, None], mask=(one < rank)[None, :] & there[:, None], other=0.0
        )
        total = tl.dot(left, right, total, input_precision="ieee" if EXACT else "tf32")
    at = (part * rows + row)[:, None] * RANK + one[None, :]
    tl.store(out + at, total, mask=(row < rows)[:, None])


@triton.jit
def _few_product(
    x, codes, scales, levels, low, b, bias, out, rows, outputs, rank,
    INPUTS: tl.constexpr, SPAN: tl.constexpr, FOUR: tl.constexpr, ASM: tl.constexpr, LOWS: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, BIAS: tl.constexpr, EXACT: tl.constexpr, CHAIN: tl.constexpr,
    BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    if CHAIN:
        if RANK == 0:
            gdc_wait()
        gdc_launch_dependents()
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    kind = x.dtype.element_ty
    column, part = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1)
    row, place = tl.program_id(2) * M + tl.arange(0, M), tl.arange(0, BLOCK)
    mine, here = row < rows, column < outputs
    total, spread = tl.zeros([N, M], tl.float32), levels
    if FOUR:
        spread = _spread(levels, ASM)
    for start in range(part * SPAN, tl.minimum((part + 1) * SPAN, INPUTS), 2 * BLOCK):
        if FOUR:
            at = column[:, None] * (INPUTS // 2) + start // 2 + place[None, :]
            both = tl.load(codes + at, mask=here[:, None], other=0).to(tl.int32)
            first, second = both >> 4, both & 15
        else:
            at = column[:, None] * INPUTS + start + place[None, :]
            first = tl.load(codes + at, mask=here[:, None], other=0)
            second = tl.load(codes + at + BLOCK, mask=here[:, None], other=0)
        of = scales + column * (INPUTS // BLOCK) + start // BLOCK
        given = x + row[None, :] * INPUTS + start + place[:, None]
        left = tl.load(given, mask=mine[None, :], other=0.0)
        right = tl.load(given + BLOCK, mask=mine[None, :], other=0.0)
        above = _share(first, spread, FOUR, ASM) * tl.load(of, mask=here, other=0.0)[:, None]
        below = _share(second, spread, FOUR, ASM) * tl.load(of + 1, mask=here, other=0.0)[:, None]
        total = tl.dot(above.to(kind), left, total, input_precision=precision)
        total = tl.dot(below.to(kind), right, total, input_precision=precision)
    if RANK > 0:
        if CHAIN:  # only now: `_factor` runs beside all of the above, and began when its own input was whole
            gdc_wait()
        if part == 0:
            for begins in tl.static_range(0, RANK, RANKS):
                one = begins + tl.arange(0, RANKS)
                seen = tl.zeros([RANKS, M], tl.float32)
                for piece in range(LOWS):
                    at = (piece * rows + row)[None, :] * RANK + one[:, None]
                    seen += tl.load(low + at, mask=mine[None, :], other=0.0)
                there = here[:, None] & (one < rank)[None, :]
                up = tl.load(b + column[:, None] * rank + one[None, :], mask=there, other=0.0)
                total = tl.dot(up, seen.to(kind), total, input_precision=precision)
    if BIAS:
        total += tl.load(bias + column, mask=here, other=0.0).to(tl.float32)[:, None]
    target = out + (part * rows + row)[None, :] * outputs + column[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=here[:, None] & mine[None, :])


def cuts_of(rows: int, outputs: int, inputs: int) -> int:
    """Into how many parts the depth of a product is cut, so that all multiprocessors have a tile."""
    tiles = parts_of(outputs, TILE[0]) * parts_of(rows, 128)
    return max(1, min(PARTS, inputs // PAIR, AT_ONCE // tiles))


def _depth(rank: int, x: Tensor) -> int:
    """How many inputs `_factor` reads at a time, so that those of a high rank have room."""
    return max(16, min(PAIR, 2 * PAIR * RANKS // (rank * x.element_size())))


def few_product(
    x: Tensor, weights: Codes, stack: Stack | None, bias: Tensor | None, parts: int = 1
) -> Tensor:
    """x · Wᵀ + bias of [rows, inputs], and with factors beside the weights (x · Aᵀ) · (s·B)ᵀ added; W is never whole.

    With several `parts` of the depth these are float32, [parts, rows, outputs], and without the bias.
    """
    (rows, inputs), (codes, scales, levels) = x.shape, weights
    outputs = scales.numel() * BLOCK // inputs
    chain, exact = chained(), x.dtype == torch.float32
    m = min(32 if exact else 128, max(16, power_above(rows)))
    low, rank, wide, lows = x, 0, 0, 0
    if stack is not None:
        rank, lows = len(stack.a), parts_of(inputs, SPAN)
        wide = max(16, power_above(rank))
        low = torch.empty(lows, rows, wide, device=x.device)
        _factor[(lows, parts_of(rows, FACTOR_ROWS))](
            x, stack.bare, low, rows, rank, inputs, SPAN, wide, exact, chain, FACTOR_ROWS, _depth(wide, x),
            num_warps=4, num_stages=3, launch_pdl=chain,
        )  # fmt: skip
    whole = parts == 1
    out = x.new_empty(rows, outputs) if whole else torch.empty(parts, rows, outputs, device=x.device)
    n, warps, stages = TILE
    given = x if stack is None else stack.b, x if bias is None else bias
    _few_product[(parts_of(outputs, n), parts, parts_of(rows, m))](
        x, codes, scales, codes if levels is None else levels, low, *given, out, rows, outputs, rank,
        inputs, parts_of(inputs // PAIR, parts) * PAIR, levels is not None, COMPILED, lows,
        wide, min(wide, RANKS), bias is not None and whole, exact, chain, BLOCK, m, n,
        num_warps=warps, num_stages=stages, launch_pdl=chain,
    )  # fmt: skip
    return out
