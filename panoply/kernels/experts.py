"""Products with a weight for each expert, over (token, expert) pairs that no copy sorts or gathers.

With N tokens and k choices a token there are k · N pairs, and pair j · N + t is token t's choice j. A `Plan` lists each
expert's pairs; kernels read rows and write results through that list, so shapes depend on N alone and the host never
waits: a captured graph serves every routing.
"""
# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from panoply.kernels.decode import begin, chained

MOST_CHOSEN = 64
"""Choices a token that `choose` can hold in registers."""


@dataclass(frozen=True)
class Plan:
    """Expert e has pairs `pairs[first[e] : first[e] + count[e]]`; tile i is of `expert[i]`, from its `row[i]`-th on."""

    pairs: Tensor
    first: Tensor
    count: Tensor
    expert: Tensor
    row: Tensor
    tile: int


def plan(chosen: Tensor, experts: int) -> Plan:
    """The plan of [k, N] choices, pairs in order: for many tokens."""
    flat = chosen.flatten()
    found, pairs = torch.sort(flat, stable=True)
    ends = torch.searchsorted(found, torch.arange(experts + 1, device=flat.device, dtype=found.dtype))
    count, tile = ends.diff(), tile_of(len(flat), experts)
    tiles = (count + tile - 1) // tile
    upto = tiles.cumsum(0)
    number = torch.arange(triton.cdiv(len(flat), tile) + experts, device=flat.device)
    expert = torch.searchsorted(upto, number, right=True).clamp_(max=experts - 1)
    # Tiles that are too many lie after the last expert's pairs, where there is nothing.
    row = (number - (upto - tiles)[expert]) * tile
    return Plan(pairs, ends[:-1], count, expert, row, tile)


def tile_of(pairs: int, experts: int) -> int:
    """Rows of a tile: about what an expert has, from 16, the least a matrix unit takes, to 128."""
    return max(16, min(128, int(triton.next_power_of_2(triton.cdiv(pairs, experts)))))


@triton.jit
def _choose(
    logits, scale, pairs, count, rows, experts,
    CHOSEN: tl.constexpr, SHARES: tl.constexpr, CHAIN: tl.constexpr, PAD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    begin(CHAIN)
    row, column, choice = tl.program_id(0), tl.arange(0, WIDE), tl.arange(0, PAD)
    value = tl.load(logits + row * experts + column, mask=column < experts, other=float("-inf"))
    best = tl.max(value, axis=0)
    total = tl.sum(tl.exp(value - best), axis=0)
    share = tl.zeros([PAD], tl.float32)
    chosen = tl.zeros([PAD], tl.int32)
    for j in range(CHOSEN):
        most = tl.max(value, axis=0)
        which = tl.argmax(value, axis=0)
        share = tl.where(choice == j, tl.exp(most - best), share)
        chosen = tl.where(choice == j, which, chosen)
        value = tl.where(column == which, float("-inf"), value)
    if SHARES:
        total = tl.sum(share, axis=0)
    here = choice < CHOSEN
    tl.store(scale + choice * rows + row, share / total, mask=here)
    place = tl.atomic_add(count + chosen, 1, mask=here, sem="relaxed")
    # Of logits that are no numbers one expert may be chosen again and again.
    tl.store(pairs + chosen * rows + place, choice * rows + row, mask=here & (place < rows))


@dataclass(frozen=True)
class Table:
    """Room for a plan of few tokens: `rows` places for each expert, which is as many as may choose it."""

    first: Tensor
    expert: Tensor
    row: Tensor
    tile: int

    @classmethod
    def of(cls, rows: int, chosen: int, experts: int, device: torch.device | str) -> Table:
        tile = min(tile_of(2 * rows * chosen, experts), max(16, triton.next_power_of_2(rows)))
        tiles = triton.cdiv(rows, tile)
        number = torch.arange(experts, device=device)
        row = (torch.arange(tiles, device=device) * tile).repeat(experts)
        return cls(number * rows, number.repeat_interleave(tiles), row, tile)


def choose(logits: Tensor, chosen: int, normalised: bool, table: Table) -> tuple[Tensor, Plan]:
    """The weights of [N, experts] float32 logits' pairs, [k · N], and their plan, in one kernel: for few tokens.

    An expert's pairs are in no fixed order, which no pair's result depends on.
    """
    rows, experts = logits.shape
    scale = logits.new_empty(chosen * rows)
    pairs = torch.empty(experts * rows, dtype=torch.int32, device=logits.device)
    count = torch.zeros(experts, dtype=torch.int32, device=logits.device)
    # Zeroing stands between the logits' kernel and this one, so that it starts after both.
    _choose[(rows,)](
        logits, scale, pairs, count, rows, experts, chosen, normalised, False,
        triton.next_power_of_2(chosen), triton.next_power_of_2(experts), num_warps=1,
    )  # fmt: skip
    return scale, Plan(pairs, table.first, count, table.expert, table.row, table.tile)


# ------------------------------------------------------------------ products


@triton.jit
def _product(
    x, weight, bias, scale, out, pairs, first, count, tile_expert, tile_row, rows, columns, depth,
    by_expert, by_column, by_depth, across,
    BIAS: tl.constexpr, SCALED: tl.constexpr, EVEN: tl.constexpr, CHAIN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    begin(CHAIN)
    number = tl.program_id(0)
    tile, column = number // across, (number % across) * N + tl.arange(0, N)
    expert, low = tl.load(tile_expert + tile), tl.load(tile_row + tile)
    many = tl.load(count + expert)
    if low < many:
        place = low + tl.arange(0, M)
        mine, here, step = place < many, column < columns, tl.arange(0, K)
        pair = tl.load(pairs + tl.load(first + expert) + place, mask=mine, other=0).to(tl.int64)
        left = x + (pair % rows)[:, None] * depth + step[None, :]
        right = (
            weight + expert.to(tl.int64) * by_expert + column[None, :] * by_column + step[:, None] * by_depth
        )
        total = tl.zeros([M, N], tl.float32)
        for at in range(0, depth, K):
            if EVEN:
                a = tl.load(left, mask=mine[:, None], other=0.0)
                b = tl.load(right, mask=here[None, :], other=0.0)
            else:
                inside = at + step < depth
                a = tl.load(left, mask=mine[:, None] & inside[None, :], other=0.0)
                b = tl.load(right, mask=here[None, :] & inside[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision="ieee")
            left += K
            right += K * by_depth
        if BIAS:
            added = tl.load(bias + expert * columns + column, mask=here, other=0.0).to(tl.float32)[None, :]
            if SCALED:
                added = added * tl.load(scale + pair, mask=mine, other=0.0)[:, None]
            total += added
        to = out + pair[:, None] * columns + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=mine[:, None] & here[None, :])


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    pairs: int,
    scale: Tensor | None = None,
    few: bool = False,
) -> Tensor:
    """[pairs, columns]: row `p % N` of [N, depth] x by the [columns, depth] weight, of any strides, of p's expert.

    Its bias is added, times the pair's `scale` where there is one.
    """
    (rows, depth), (_, columns, _) = x.shape, weight.shape
    out = x.new_empty(pairs, columns)
    n, k, warps, stages = _blocks(plan.tile, x.element_size(), few)
    across = triton.cdiv(columns, n)
    chain = few and chained()
    _product[(len(plan.expert) * across,)](
        x, weight, weight if bias is None else bias, x if scale is None else scale, out,
        plan.pairs, plan.first, plan.count, plan.expert, plan.row,
        rows, columns, depth, *weight.stride(), across,
        bias is not None, scale is not None, depth % k == 0, chain, plan.tile, n, k,
        num_warps=warps, num_stages=stages, launch_pdl=chain,
    )  # fmt: skip
    return out


def _blocks(tile: int, size: int, few: bool) -> tuple[int, int, int, int]:
    """Columns and depth of a tile, warps and stages."""
    if size == 4:
        return 64, 32, 4, 2
    if few:
        return 64, 128, 4, 3
    return 128, 64, 8 if tile == 128 else 4, 3


@triton.jit
def _slope(
    g, x, out, pairs, first, count, g_rows, x_rows, columns, depth,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    column, inner = tl.program_id(1) * N + tl.arange(0, N), tl.program_id(0) * K + tl.arange(0, K)
    here, inside = column < columns, inner < depth
    start, many = pairs + tl.load(first + expert), tl.load(count + expert)
    total = tl.zeros([N, K], tl.float32)
    for low in range(0, many, M):
        place = low + tl.arange(0, M)
        mine = place < many
        pair = tl.load(start + place, mask=mine, other=0).to(tl.int64)
        a = tl.load(
            g + (pair % g_rows)[:, None] * columns + column[None, :],
            mask=mine[:, None] & here[None, :],
            other=0.0,
        )
        b = tl.load(
            x + (pair % x_rows)[:, None] * depth + inner[None, :],
            mask=mine[:, None] & inside[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
    to = out + (expert.to(tl.int64) * columns + column)[:, None] * depth + inner[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=here[:, None] & inside[None, :])


def slope(g: Tensor, x: Tensor, plan: Plan, weight: Tensor) -> Tensor:
    """[experts, columns, depth]: each expert's sum over its pairs of g ⊗ x, rows read as in `product`."""
    columns, depth = g.shape[1], x.shape[1]
    out = torch.empty_like(weight, memory_format=torch.contiguous_format)
    block = (64, 128, 128, 8, 3) if g.element_size() == 2 else (32, 64, 64, 4, 2)
    m, n, k, warps, stages = block
    _slope[(triton.cdiv(depth, k), triton.cdiv(columns, n), len(weight))](
        g, x, out, plan.pairs, plan.first, plan.count, len(g), len(x), columns, depth, m, n, k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


# ------------------------------------------------------------------ between the products


@triton.jit
def _activated(gate, up, alpha, limit, CLAMP: tl.constexpr):
    """gate · σ(alpha · gate) · up, with `CLAMP` of clamped inputs and up + 1; and the slopes by gate and up."""
    inside, between = gate == gate, up == up
    if CLAMP:
        inside, between = gate <= limit, (up >= -limit) & (up <= limit)
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
    share = 1.0 / (1.0 + tl.exp(-alpha * gate))
    bent = gate * share
    by_gate = tl.where(inside, up * share * (1.0 + alpha * gate * (1.0 - share)), 0.0)
    return bent * up, by_gate, tl.where(between, bent, 0.0)


@triton.jit
def _gated(
    both, scale, out, inner, alpha, limit, CLAMP: tl.constexpr, CHAIN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    begin(CHAIN)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    at = row * 2 * inner + column
    gate = tl.load(both + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + at + inner, mask=inside, other=0.0).to(tl.float32)
    value, _, _ = _activated(gate, up, alpha, limit, CLAMP)
    tl.store(out + row * inner + column, (value * tl.load(scale + row)).to(out.dtype.element_ty), mask=inside)


def gated(both: Tensor, scale: Tensor, alpha: float, limit: float, few: bool = False) -> Tensor:
    """[pairs, inner]: each pair's weight times its activation, of [pairs, 2 · inner] in which the gates come first."""
    pairs, inner = both.shape[0], both.shape[1] // 2
    out = both.new_empty(pairs, inner)
    chain = few and chained()
    block = min(1024, triton.next_power_of_2(inner))
    _gated[(pairs, triton.cdiv(inner, block))](
        both, scale, out, inner, alpha, limit, limit > 0, chain, block, num_warps=4, launch_pdl=chain
    )
    return out


@triton.jit
def _gated_back(
    both, scale, g, out, g_both, g_scale, inner, alpha, limit, CLAMP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(scale + row)
    total = tl.zeros([BLOCK], tl.float32)
    for low in range(0, inner, BLOCK):
        column = low + tl.arange(0, BLOCK)
        inside = column < inner
        at, narrow = row * 2 * inner + column, row * inner + column
        gate = tl.load(both + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(both + at + inner, mask=inside, other=0.0).to(tl.float32)
        steep = tl.load(g + narrow, mask=inside, other=0.0).to(tl.float32)
        value, by_gate, by_up = _activated(gate, up, alpha, limit, CLAMP)
        total += steep * value
        steep *= weight
        kind = out.dtype.element_ty
        tl.store(out + narrow, (value * weight).to(kind), mask=inside)
        tl.store(g_both + at, (steep * by_gate).to(kind), mask=inside)
        tl.store(g_both + at + inner, (steep * by_up).to(kind), mask=inside)
    tl.store(g_scale + row, tl.sum(total, axis=0))


def gated_back(
    both: Tensor, scale: Tensor, g: Tensor, alpha: float, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`gated` again, and the slopes by `both` and by `scale`."""
    out, g_both, g_scale = torch.empty_like(g), torch.empty_like(both), torch.empty_like(scale)
    inner = g.shape[1]
    _gated_back[(len(g),)](
        both, scale, g, out, g_both, g_scale, inner, alpha, limit, limit > 0,
        min(1024, triton.next_power_of_2(inner)), num_warps=4,
    )  # fmt: skip
    return out, g_both, g_scale
