"""Drawing the next token of every row and moving the row on, in two kernels over the logits.

The first takes maxima and sums of pieces of the vocabulary; the second finds the piece in which a row's uniform
number falls, then the token in it, and does the row's bookkeeping. The stream of uniforms is `rollout.sampling`'s.
Where something is cut off, `kernels/cut.py` says in between what is left.
"""
# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from panoply.kernels.cut import Kept, Rule, keep, rank_of, write_ids
from panoply.kernels.decode import begin, chained
from panoply.rollout.cuts import LISTED

PIECE = 4096
"""Vocabulary entries one program reads."""


@triton.jit
def _pieces(
    logits, temperatures, start, position, highest, first, mass, weighted, vocab, pieces,
    CHAIN: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    begin(CHAIN)
    # From the end of the vocabulary on: what was computed last is still in the GPU's cache.
    row, piece = tl.program_id(0), pieces - 1 - tl.program_id(1)
    within = tl.load(position + row) + 1 - tl.load(start + row)
    temperature = tl.load(temperatures + within)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    column = piece * PIECE + tl.arange(0, PIECE)
    z = tl.load(logits + row.to(tl.int64) * vocab + column, mask=column < vocab, other=float("-inf"))
    z = z / temperature
    top, arg = tl.max(z, axis=0, return_indices=True)
    share = tl.exp(z - tl.where(top == float("-inf"), 0.0, top))  # a mask may leave nothing of a piece
    out = row * pieces + piece
    tl.store(highest + out, top)
    tl.store(first + out, (piece * PIECE + arg).to(tl.int32))
    tl.store(mass + out, tl.sum(share, axis=0))
    tl.store(weighted + out, tl.sum(tl.where(z > float("-inf"), share * z, 0.0), axis=0))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _draw(
    logits, temperatures, highest, first, mass, weighted, stops,
    stream, token, position, start, limit, status, tick, history, history_stride,
    out_live, out_position, out_action, out_logp, out_temperature, out_entropy,
    last_rank, kept, count, least, next_best, out_cut, out_kept, out_count,
    rows, vocab, pieces,
    CHAIN: tl.constexpr, STOP: tl.constexpr, LENGTH: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    CUT: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    begin(CHAIN)
    row = tl.program_id(0)
    piece = tl.arange(0, PIECES)
    here = piece < pieces
    top = tl.load(highest + row * pieces + piece, mask=here, other=float("-inf"))
    summit, best = tl.max(top, axis=0, return_indices=True)
    fade = tl.exp(top - summit)
    share = tl.load(mass + row * pieces + piece, mask=here, other=0.0) * fade
    part = tl.where(here, share, 0.0).to(tl.float64)
    whole = tl.sum(part, axis=0)
    normaliser = summit + tl.log(whole.to(tl.float32))
    mean = tl.sum(tl.load(weighted + row * pieces + piece, mask=here, other=0.0) * fade, axis=0) / whole.to(
        tl.float32
    )

    full = normaliser
    if CUT:  # from here on there is only what is kept
        part = tl.load(kept + row * pieces + piece, mask=here, other=0.0).to(tl.float64)
        all_mass = whole
        whole = tl.sum(part, axis=0)
        normaliser = summit + tl.log(whole.to(tl.float32))

    at = tl.load(position + row)
    within = at + 1 - tl.load(start + row)
    given = tl.load(temperatures + within)
    temperature = tl.where(given == 0.0, 1.0, given)
    bits = _mix(tl.load(stream + row).to(tl.uint64) + (at + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    uniform = ((bits >> 24).to(tl.float64) + 0.5) * (1.0 / 1099511627776.0)

    # The piece that holds the number, then the token in it, whose sum is taken anew so that it cannot run over.
    goal = uniform * whole
    below = tl.cumsum(part, axis=0) <= goal
    chosen = tl.minimum(tl.sum(below.to(tl.int32), axis=0), pieces - 1)
    before = tl.sum(tl.where(piece < chosen, part, 0.0), axis=0)
    held = tl.sum(tl.where(piece == chosen, part, 0.0), axis=0)
    goal = (goal - before) / tl.where(held > 0.0, held, 1.0)
    goal = tl.minimum(tl.maximum(goal, 0.0), 1.0)
    column = chosen * PIECE + tl.arange(0, PIECE)
    line = logits + row.to(tl.int64) * vocab
    z = tl.load(line + column, mask=column < vocab, other=float("-inf")) / temperature
    p = tl.exp(z - summit).to(tl.float64)
    if CUT:
        p = tl.where(rank_of(z, summit) <= tl.load(last_rank + row), p, 0.0)
    reached = tl.cumsum(p, axis=0)
    found = tl.sum((reached <= goal * tl.sum(p, axis=0)).to(tl.int32), axis=0)
    last = tl.max(tl.where(p > 0.0, tl.arange(0, PIECE), 0), axis=0)
    drawn = chosen * PIECE + tl.minimum(found, last)
    greedy = tl.load(first + row * pieces + best)
    action = tl.minimum(tl.where(given == 0.0, greedy, drawn), vocab - 1)  # also where logits are no numbers
    logp = tl.load(line + action) / temperature - normaliser

    state = tl.load(status + row)
    live = state == 0
    step = tl.load(tick + row)
    out = step * rows + row
    tl.store(out_live + out, live)
    tl.store(out_position + out, at + 1)
    tl.store(out_action + out, action.to(tl.int64))
    tl.store(out_logp + out, logp)
    tl.store(out_temperature + out, temperature)
    tl.store(out_entropy + out, full - mean)
    if CUT:
        number = tl.sum(tl.load(count + row * pieces + piece, mask=here, other=0), axis=0)
        low = tl.min(tl.load(least + row * pieces + piece, mask=here, other=float("inf")), axis=0)
        high = tl.max(tl.load(next_best + row * pieces + piece, mask=here, other=float("-inf")), axis=0)
        everything = high == float("-inf")
        edge = tl.where(everything | (number <= LISTED), float("-inf"), (low + high) / 2 - full)
        tl.store(out_cut + out, edge)
        tl.store(out_kept + out, (whole / all_mass).to(tl.float32))
        tl.store(out_count + out, tl.where(everything | (number > LISTED), 0, number))
    tl.store(tick + row, step + 1)

    ends = tl.where(at + 2 >= tl.load(limit + row), LENGTH, 0)
    ends = tl.where(tl.load(stops + action) != 0, STOP, ends)
    tl.store(history + row.to(tl.int64) * history_stride + at + 1, action.to(tl.int64), mask=live)
    tl.store(token + row, action.to(tl.int64), mask=live)
    tl.store(position + row, at + 1, mask=live)
    tl.store(status + row, ends.to(tl.int64), mask=live)


@dataclass(frozen=True)
class Record:
    """What a burst of steps drew, [steps, rows] each."""

    live: Tensor
    position: Tensor
    action: Tensor
    logp: Tensor
    temperature: Tensor
    entropy: Tensor
    cut: Tensor
    kept: Tensor
    count: Tensor
    """How many ids are listed, 0 for none."""
    ids: Tensor
    """[steps, rows, LISTED] where something is cut off."""

    @staticmethod
    def empty(steps: int, rows: int, device: torch.device | str, cuts: bool = False) -> Record:
        def column(dtype: torch.dtype, wanted: bool = True) -> Tensor:
            return torch.zeros(steps if wanted else 0, rows, dtype=dtype, device=device)

        live, position, action = (column(dtype) for dtype in (torch.bool, torch.long, torch.long))
        logp, temperature, entropy = (column(torch.float32) for _ in range(3))
        cut, kept, count = (column(dtype, cuts) for dtype in (torch.float32, torch.float32, torch.int32))
        ids = torch.zeros(steps if cuts else 0, rows, LISTED, dtype=torch.int32, device=device)
        return Record(live, position, action, logp, temperature, entropy, cut, kept, count, ids)

    def first(self, steps: int, rows: int) -> Record:
        """A copy of so many steps and rows, one after another."""
        columns = (getattr(self, field.name) for field in fields(self))
        return Record(*(c[:steps, :rows].flatten(0, 1).clone() for c in columns))


@dataclass(frozen=True)
class State:
    """What the kernels change: a slot's stream, newest token, place and status, its history, and a clock.

    And what they read beside it: `held` positions at the beginning of the row `holder` are those of the slot's own.
    """

    stream: Tensor
    token: Tensor
    position: Tensor
    start: Tensor
    limit: Tensor
    status: Tensor
    tick: Tensor
    holder: Tensor
    held: Tensor
    history: Tensor

    @staticmethod
    def empty(rows: int, capacity: int, device: torch.device | str) -> State:
        shapes = [(rows,)] * 9 + [(rows, capacity)]
        return State(*(torch.zeros(shape, dtype=torch.long, device=device) for shape in shapes))


def draw_and_move(
    logits: Tensor,
    temperature: Tensor,
    stops: Tensor,
    state: State,
    record: Record,
    stop: int,
    length: int,
    rule: Rule | None = None,
) -> None:
    """Draw from [rows, V] float32 logits, write the step into `record` and move live slots on by one token.

    Logits of −∞ are never drawn. `temperature[i]` is the temperature of a turn's token i, 0 for the likeliest; `stops`
    marks tokens that end a turn. `rule` says what is cut off.
    """
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE)
    highest, mass, weighted = (logits.new_empty(rows, pieces) for _ in range(3))
    first = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    _pieces[(rows, pieces)](
        logits, temperature, state.start, state.position, highest, first, mass, weighted, vocab, pieces,
        chained(), PIECE, num_warps=8, launch_pdl=chained(),
    )  # fmt: skip
    kept: Kept | None = None
    if rule:
        seen = (logits, temperature, state.start, state.position, highest)
        kept = keep(*seen, rule, PIECE)
        write_ids(*seen, kept, state.tick, record.ids, PIECE)
    cut = (mass,) * 5 if kept is None else (kept.limit, kept.mass, kept.count, kept.least, kept.next_best)
    _draw[(rows,)](
        logits, temperature, highest, first, mass, weighted, stops,
        state.stream, state.token, state.position, state.start, state.limit, state.status, state.tick,
        state.history, state.history.stride(0),
        record.live, record.position, record.action, record.logp, record.temperature, record.entropy,
        *cut, record.cut, record.kept, record.count,
        rows, vocab, pieces,
        CHAIN=chained(), STOP=stop, LENGTH=length, PIECES=triton.next_power_of_2(pieces), PIECE=PIECE,
        CUT=kept is not None, LISTED=LISTED, num_warps=8, launch_pdl=chained(),
    )  # fmt: skip
