"""The threshold of top-k, top-p and min-p for every row, without a sort: the sets that `rollout/cuts.py` defines.

A token's rank is a whole number of 20 bits. Each of five passes over the logits finds four bits of a threshold:
pieces of the vocabulary sum what lies in each of 16 ranges of ranks, and the next pass goes on inside the range where
the sum from above reaches its goal, a count or a share of the mass. A last pass sums what is kept.
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

PASSES, PART = 5, 512
"""Passes of a search, and how many tokens are sorted into ranges at a time."""


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
def _found(
    table, base, above, goal, rule, row, rows, pieces, PASS: tl.constexpr, COUNT: tl.constexpr, PIECES: tl.constexpr
):  # fmt: skip
    """After so many passes: the first rank of the range that is left, what lies above it, and the goal."""
    first = (row * 0).to(tl.int32)
    over, wanted = first.to(tl.float64), first.to(tl.float64)
    if PASS > 0:
        piece, cell = tl.arange(0, PIECES), tl.arange(0, 16)
        at = ((PASS - 1) * rows + row) * pieces + piece
        cells = tl.load(table + at[:, None] * 16 + cell[None, :], mask=piece[:, None] < pieces, other=0.0)
        cells = tl.sum(cells.to(tl.float64), axis=0)
        if PASS == 1:
            wanted = tl.load(rule)
            if not COUNT:
                wanted = wanted * tl.sum(cells, axis=0)
        else:
            before = (PASS - 1) * rows + row
            first, over, wanted = tl.load(base + before), tl.load(above + before), tl.load(goal + before)
        reached = over + tl.cumsum(cells, axis=0)
        index = tl.minimum(tl.sum((reached < wanted).to(tl.int32), axis=0), 15)
        over += tl.sum(tl.where(cell < index, cells, 0.0), axis=0)
        first += index << (20 - 4 * PASS)
    return first, over, wanted


@triton.jit
def _narrow(
    logits, temperatures, start, position, highest, rule, ceiling, table, base, above, goal, rows, vocab, pieces,
    PASS: tl.constexpr, COUNT: tl.constexpr, CEILING: tl.constexpr, CHAIN: tl.constexpr, PIECES: tl.constexpr,
    PIECE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    begin(CHAIN)
    row, piece = tl.program_id(0), tl.program_id(1)
    first, over, wanted = _found(table, base, above, goal, rule, row, rows, pieces, PASS, COUNT, PIECES)
    leader = piece == 0
    tl.store(base + PASS * rows + row, first, mask=leader)
    tl.store(above + PASS * rows + row, over, mask=leader)
    tl.store(goal + PASS * rows + row, wanted, mask=leader)
    summit = _summit(highest, row, pieces, PIECES)
    _, temperature = temperature_of(temperatures, start, position, row)
    last = 0xFFFFF
    if CEILING:
        last = tl.load(ceiling + row)
    cell = tl.arange(0, 16)
    total = tl.zeros([PART, 16], tl.float32)
    for low in range(0, PIECE, PART):
        column = piece * PIECE + low + tl.arange(0, PART)
        z = (
            tl.load(logits + row.to(tl.int64) * vocab + column, mask=column < vocab, other=float("-inf"))
            / temperature
        )
        rank = rank_of(z, summit)
        place = rank - first
        place = tl.where((place >= 0) & (rank <= last), place >> (16 - 4 * PASS), 16)
        weight = tl.exp(z - summit)
        if COUNT:
            weight = tl.full([PART], 1.0, tl.float32)
        total += tl.where(place[:, None] == cell[None, :], weight[:, None], 0.0)
    at = ((PASS * rows + row) * pieces + piece) * 16
    tl.store(table + at + cell, tl.sum(total, axis=0))


@triton.jit
def _settle(
    table, base, above, goal, rule, limit, rows, pieces,
    COUNT: tl.constexpr, CHAIN: tl.constexpr, PIECES: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    begin(CHAIN)
    row = tl.program_id(0)
    first, _, _ = _found(table, base, above, goal, rule, row, rows, pieces, PASSES, COUNT, PIECES)
    tl.store(limit + row, first)


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
    wanted = (tl.sum(counts, axis=0) <= LISTED) & (own > 0)
    summit = _summit(highest, row, pieces, PIECES)
    _, temperature = temperature_of(temperatures, start, position, row)
    column = piece * PIECE + tl.arange(0, PIECE)
    read = (column < vocab) & wanted
    z = tl.load(logits + row.to(tl.int64) * vocab + column, mask=read, other=float("-inf")) / temperature
    inside = (rank_of(z, summit) <= tl.load(limit + row)) & read
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
            searched = _search(shared, goal, searched, counts, piece)
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


def _search(
    shared: tuple[Tensor, ...], goal: Tensor, ceiling: Tensor | None, counts: bool, piece: int
) -> Tensor:
    """The last rank that is needed for a sum over ranks, up to a `ceiling`, to reach a goal."""
    logits, highest = shared[0], shared[-1]
    rows, pieces = highest.shape
    table = logits.new_empty(PASSES, rows, pieces, 16)
    base = torch.empty(PASSES, rows, dtype=torch.int32, device=logits.device)
    above, wanted = (torch.empty(PASSES, rows, dtype=torch.float64, device=logits.device) for _ in range(2))
    wide = triton.next_power_of_2(pieces)
    for index in range(PASSES):
        _narrow[(rows, pieces)](
            *shared, goal, base if ceiling is None else ceiling, table, base, above, wanted, rows,
            logits.shape[1], pieces,
            PASS=index, COUNT=counts, CEILING=ceiling is not None, CHAIN=chained(), PIECES=wide, PIECE=piece,
            PART=min(PART, piece), num_warps=8, launch_pdl=chained(),
        )  # fmt: skip
    limit = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _settle[(rows,)](
        table, base, above, wanted, goal, limit, rows, pieces,
        COUNT=counts, CHAIN=chained(), PIECES=wide, PASSES=PASSES, num_warps=4, launch_pdl=chained(),
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
