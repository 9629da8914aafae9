"""The threshold of top-k, top-p and min-p for every row, without a sort: the sets that `rollout/cuts.py` defines.

A token's rank is a whole number of 20 bits. Of every row a program looks for the rank at which a sum from above reaches
its goal, a count or a share of the mass. Every few tokens, a sample, tell about where that is. A pass over the logits
then sums what lies above, and in a table what has each of 8,192 ranks, or ranges of ranks, around there; where the goal
was not among them, or ranges have several ranks, another pass goes on. A last pass sums what is kept.
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
from panoply.rollout.cuts import FARTHEST, LISTED, SLACK, farthest

CELLS, BLOCK, WARPS = 8192, 4096, 32
"""Ranges of ranks whose sums a pass finds, tokens that it reads at a time, and warps that do so."""


@triton.jit
def rank_of(z, summit):
    """How far below the likeliest token a tempered logit is; beyond all ranks where it has no probability."""
    bits = (1.0 + (summit - z)).to(tl.int32, bitcast=True)
    rank = tl.minimum((bits - 0x3F800000) >> 6, 0xFFFFF)
    return tl.where(z == float("-inf"), 0x100000, rank)


@triton.jit
def temperature_of(temperatures, start, position, row):
    """The temperature that a row's next token was given, and what its logits are divided by."""
    given = tl.load(temperatures + tl.load(position + row) + 1 - tl.load(start + row))
    return given, tl.where(given == 0.0, 1.0, given)


@triton.jit
def _summit(highest, row, pieces, PIECES: tl.constexpr):
    piece = tl.arange(0, PIECES)
    return tl.max(tl.load(highest + row * pieces + piece, mask=piece < pieces, other=float("-inf")), axis=0)


@triton.jit
def _weighed(line, column, temperature, summit, last, vocab, COUNT: tl.constexpr):
    """Tokens' ranks, what they weigh in a sum (a share, or 1), and whether they are summed at all."""
    z = tl.load(line + column, mask=column < vocab, other=float("-inf")) / temperature
    rank = rank_of(z, summit)
    weight = tl.exp(z - summit)
    if COUNT:
        weight = tl.full(z.shape, 1.0, tl.float32)
    return rank, weight, rank <= last


@triton.jit
def _add_to_cells(table, rank, weight, counted, first, shift, UNIT: tl.constexpr, CELLS: tl.constexpr):
    """Whole numbers, so that sums do not depend on who comes first."""
    place = (rank - first) >> shift
    inside = counted & (rank >= first) & (place < CELLS)
    tl.atomic_add(table + place, (weight * UNIT).to(tl.int64), mask=inside, sem="relaxed")


@triton.jit
def _meet(THREADS: tl.constexpr):
    """All threads of a program wait until what each has written, or added to, is there for the others."""
    if THREADS > 0:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, $1;",
            "=r,r",
            [tl.arange(0, THREADS)],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit
def _cells(table, UNIT: tl.constexpr, CELLS: tl.constexpr, THREADS: tl.constexpr):
    """What the cells hold, from the first up to each; they are emptied."""
    cell = tl.arange(0, CELLS)
    _meet(THREADS)
    held = tl.load(table + cell, cache_modifier=".cg")
    tl.debug_barrier()  # who reads a cell need not be who empties it
    tl.store(table + cell, tl.zeros([CELLS], tl.int64))
    _meet(THREADS)
    return tl.cumsum(held, axis=0).to(tl.float64) * (1.0 / UNIT)


@triton.jit
def _shift(width, CELLS: tl.constexpr):
    """The least one with which so many ranks fit into the cells."""
    shift = width * 0
    for bits in tl.static_range(13):
        shift += (width > CELLS * (1 << bits)).to(tl.int32)
    return shift


@triton.jit
def _guess(
    line, temperature, summit, last, share, vocab, table,
    COUNT: tl.constexpr, UNIT: tl.constexpr, CELLS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """The ranks between which a sum probably reaches its share, by every few tokens of a row."""
    index = tl.arange(0, CELLS)
    column = (index // 8) * (vocab // (CELLS // 8)) + index % 8
    rank, weight, counted = _weighed(line, column, temperature, summit, last, vocab, COUNT)
    coarse = _shift(last * 0 + 0x100000, CELLS)
    _add_to_cells(table, rank, weight, counted, 0, coarse, UNIT, CELLS)
    weight = tl.where(counted, weight, 0.0)
    whole, squares = tl.sum(weight, axis=0), tl.sum(weight * weight, axis=0)
    noise = squares / tl.maximum(whole * whole, 1e-30)
    slack = 4.0 * tl.sqrt(share * (1.0 - share) * noise) + 2.0 * noise
    reached = _cells(table, UNIT, CELLS, THREADS) / tl.maximum(whole, 1e-30)
    first = tl.sum((reached < share - slack).to(tl.int32), axis=0)
    after = tl.sum((reached < share + slack).to(tl.int32), axis=0) + 1
    return first << coarse, tl.minimum(after << coarse, last + 1)


@triton.jit
def _search(
    logits, temperatures, start, position, highest, rule, ceiling, limit, tables, vocab, pieces,
    COUNT: tl.constexpr, CEILING: tl.constexpr, SAMPLE: tl.constexpr, CHAIN: tl.constexpr, UNIT: tl.constexpr,
    PIECES: tl.constexpr, CELLS: tl.constexpr, BLOCK: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    begin(CHAIN)
    row = tl.program_id(0)
    line, table = logits + row.to(tl.int64) * vocab, tables + row * CELLS
    summit = _summit(highest, row, pieces, PIECES)
    _, temperature = temperature_of(temperatures, start, position, row)
    tl.store(table + tl.arange(0, CELLS), tl.zeros([CELLS], tl.int64))
    _meet(THREADS)
    last = row * 0 + 0xFFFFF
    if CEILING:
        last = tl.minimum(last, tl.load(ceiling + row))
    wanted = tl.load(rule)
    low, high = row * 0 - 1, last
    if COUNT:
        share = (wanted / vocab).to(tl.float32)
    else:
        share = wanted.to(tl.float32)
        # Beyond this gap all tokens together weigh less than what may lack.
        gap = tl.log(vocab / (1.0 - share))
        high = tl.minimum(high, rank_of(summit - gap, summit) + 1)
    first, after = low + 1, high + 1
    if SAMPLE:
        first, after = _guess(
            line, temperature, summit, high, tl.minimum(share, 1.0), vocab, table, COUNT, UNIT, CELLS, THREADS
        )
    while high - low > 1:
        shift = _shift(after - first, CELLS)
        below, total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for begins in range(0, vocab, BLOCK):
            column = begins + tl.arange(0, BLOCK)
            rank, weight, counted = _weighed(line, column, temperature, summit, last, vocab, COUNT)
            weight = tl.where(counted, weight, 0.0)
            total += weight
            below += tl.where(rank < first, weight, 0.0)
            _add_to_cells(table, rank, weight, counted, first, shift, UNIT, CELLS)
        goal = wanted
        if not COUNT:
            goal = wanted * tl.sum(total.to(tl.float64), axis=0)
        over = tl.sum(below.to(tl.float64), axis=0)
        index = tl.sum((over + _cells(table, UNIT, CELLS, THREADS) < goal).to(tl.int32), axis=0)
        end = first + (index << shift)  # where the cell begins in which the sum reaches its goal
        past = tl.where(index == CELLS, high, tl.minimum(high, end + (1 << shift) - 1))
        high = tl.where(over >= goal, tl.minimum(high, first - 1), past)
        low = tl.where(over >= goal, low, tl.minimum(end - 1, high - 1))
        first, after = low + 1, high + 1
    tl.store(limit + row, high)


@triton.jit
def _keep(
    logits, temperatures, start, position, highest, searched, most, limit, mass, count, least, next_best,
    rows, vocab, pieces, SEARCHED: tl.constexpr, CHAIN: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    begin(CHAIN)
    row, piece = tl.program_id(0), tl.program_id(1)
    summit = _summit(highest, row, pieces, PIECES)
    given, temperature = temperature_of(temperatures, start, position, row)
    last = tl.load(most)
    if SEARCHED:
        last = tl.minimum(last, tl.load(searched + row))
    last = tl.where(given == 0.0, 0xFFFFF, last)  # nothing is cut from what takes the likeliest
    tl.store(limit + row, last, mask=piece == 0)
    column = piece * PIECE + tl.arange(0, PIECE)
    z = (
        tl.load(logits + row.to(tl.int64) * vocab + column, mask=column < vocab, other=float("-inf"))
        / temperature
    )
    inside = rank_of(z, summit) <= last
    out = row * pieces + piece
    tl.store(mass + out, tl.sum(tl.where(inside, tl.exp(z - summit), 0.0), axis=0))
    tl.store(count + out, tl.sum(inside.to(tl.int32), axis=0))
    tl.store(least + out, tl.min(tl.where(inside, z, float("inf")), axis=0))
    tl.store(next_best + out, tl.max(tl.where(inside, float("-inf"), z), axis=0))


@triton.jit
def _list(
    logits, temperatures, start, position, highest, limit, count, tick, ids, rows, vocab, pieces,
    CHAIN: tl.constexpr, LISTED: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    begin(CHAIN)
    row, piece = tl.program_id(0), tl.program_id(1)
    each = tl.arange(0, PIECES)
    counts = tl.load(count + row * pieces + each, mask=each < pieces, other=0)
    before = tl.sum(tl.where(each < piece, counts, 0), axis=0)
    own = tl.sum(tl.where(each == piece, counts, 0), axis=0)
    if (tl.sum(counts, axis=0) <= LISTED) & (own > 0):
        summit = _summit(highest, row, pieces, PIECES)
        _, temperature = temperature_of(temperatures, start, position, row)
        column = piece * PIECE + tl.arange(0, PIECE)
        here = column < vocab
        z = tl.load(logits + row.to(tl.int64) * vocab + column, mask=here, other=float("-inf")) / temperature
        inside = (rank_of(z, summit) <= tl.load(limit + row)) & here
        place = before + tl.cumsum(inside.to(tl.int32), axis=0) - 1
        at = (tl.load(tick + row) * rows + row) * LISTED
        tl.store(ids + at + place, column.to(tl.int32), mask=inside)


@dataclass(frozen=True)
class Rule:
    """What is cut, by numbers on the device that a captured graph reads, and which of them act."""

    top_k: Tensor
    top_p: Tensor
    most: Tensor
    """The last rank that min-p leaves."""
    counts: bool = False
    shares: bool = False
    bounds: bool = False

    @staticmethod
    def empty(device: torch.device | str) -> Rule:
        top_k, top_p = (torch.ones(1, dtype=torch.float64, device=device) for _ in range(2))
        return Rule(top_k, top_p, torch.full((1,), FARTHEST, dtype=torch.int32, device=device))

    def set(self, top_k: int | None, top_p: float, min_p: float) -> Rule:
        """The same numbers on the device, with other values."""
        self.top_k.fill_(top_k or 1)
        self.top_p.fill_(top_p * (1 - SLACK))
        self.most.fill_(farthest(min_p))
        return Rule(self.top_k, self.top_p, self.most, top_k is not None, top_p < 1, min_p > 0)

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        return self.counts, self.shares, self.bounds

    def __bool__(self) -> bool:
        return any(self.kind)


@dataclass(frozen=True)
class Kept:
    """What a rule leaves: a row's last rank, and of each piece mass, count, the least inside, the best outside."""

    limit: Tensor
    mass: Tensor
    count: Tensor
    least: Tensor
    next_best: Tensor


def keep(
    logits: Tensor,
    temperature: Tensor,
    start: Tensor,
    position: Tensor,
    highest: Tensor,
    rule: Rule,
    piece: int,
) -> Kept:
    """Of [rows, V] float32 logits, of whose pieces the `highest` tempered ones are known."""
    rows, pieces = highest.shape
    shared = (logits, temperature, start, position, highest)
    searched = None
    for wanted, goal, counts in ((rule.counts, rule.top_k, True), (rule.shares, rule.top_p, False)):
        if wanted:
            searched = _searched(shared, goal, searched, counts)
    limit = torch.empty(rows, dtype=torch.int32, device=logits.device)
    count = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    mass, least, next_best = (torch.empty_like(highest) for _ in range(3))
    _keep[(rows, pieces)](
        *shared, limit if searched is None else searched, rule.most, limit, mass, count, least, next_best,
        rows, logits.shape[1], pieces,
        SEARCHED=searched is not None, CHAIN=chained(), PIECES=triton.next_power_of_2(pieces), PIECE=piece,
        num_warps=8, launch_pdl=chained(),
    )  # fmt: skip
    return Kept(limit, mass, count, least, next_best)


def _searched(shared: tuple[Tensor, ...], goal: Tensor, ceiling: Tensor | None, counts: bool) -> Tensor:
    """The last rank that is needed for a sum over ranks, up to a `ceiling`, to reach a goal."""
    logits, highest = shared[0], shared[-1]
    (rows, vocab), pieces = logits.shape, highest.shape[1]
    limit = torch.empty(rows, dtype=torch.int32, device=logits.device)
    table = torch.empty(rows, CELLS, dtype=torch.int64, device=logits.device)
    _search[(rows,)](
        *shared, goal, limit if ceiling is None else ceiling, limit, table, vocab, pieces,
        COUNT=counts, CEILING=ceiling is not None, SAMPLE=vocab >= 4 * CELLS, CHAIN=chained(),
        UNIT=1.0 if counts else 2.0**40, PIECES=triton.next_power_of_2(pieces), CELLS=CELLS, BLOCK=BLOCK,
        THREADS=32 * WARPS if logits.is_cuda else 0, num_warps=WARPS, launch_pdl=chained(),
    )  # fmt: skip
    return limit


def write_ids(
    logits: Tensor,
    temperature: Tensor,
    start: Tensor,
    position: Tensor,
    highest: Tensor,
    kept: Kept,
    tick: Tensor,
    ids: Tensor,
    piece: int,
) -> None:
    """The ids of what is kept, into `ids` [steps, rows, LISTED] at each row's tick, where they are few enough."""
    rows, pieces = highest.shape
    _list[(rows, pieces)](
        logits, temperature, start, position, highest, kept.limit, kept.count, tick, ids, rows, logits.shape[1], pieces,
        CHAIN=chained(), LISTED=LISTED, PIECES=triton.next_power_of_2(pieces), PIECE=piece, num_warps=8,
        launch_pdl=chained(),
    )  # fmt: skip
