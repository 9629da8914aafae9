"""Thought graphs: which step of reasoning comes next, where a reasoner errs the more the more it is given at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.worlds.control.drawing import BLUE, FAINT, GREEN, INK, RED, Canvas
from panoply.worlds.control.simulated import Draws, Moved, Simulated, State
from panoply.worlds.control.world import Array, Box, Discrete, Space

SPLIT, SOLVE, REFINE, AGAIN, MERGE, FINISH = range(6)
NAMES = ("split", "solve", "refine", "again", "merge", "finish")
SLOTS = 8
"""Nodes that can be open at a time."""
STEP = 16
"""Lists have a multiple of so many numbers."""


@world("thoughts@1")
@dataclass(frozen=True)
class Thoughts(Simulated):
    """A list of numbers is sorted by a reasoner that is asked for one operation at a time; a policy says which.

        64?  split→  32? 32?  solve→  32:3 32?  again→  32:1 32?  …  merge→  64:2  refine→  64:1  finish

    A node is a piece of the list, still to be sorted (`?`) or sorted with so many numbers in the wrong place. Every
    operation but the last is a call of the reasoner, and after `calls` of them it is over:

    - `split` halves the largest piece.
    - `solve` sorts the largest one, rightly with probability e^(−length/κ).
    - `again` sorts the worst sorted one anew and keeps the better.
    - `refine` halves the errors of the worst one with probability 0.9·e^(−length/4κ), and in one of ten cases adds one.
    - `merge` puts the two shortest sorted ones together, with their errors, and with no more with e^(−length/4κ).
    - `finish` needs all of the list in one sorted node.

    Errors can be seen, as they can when a list is checked. The episode pays minus the share of numbers in the wrong
    place, −1 if it never finished, and `price` less for every call. Signals: `success` (no error), `error`, `call`.
    """

    sizes: tuple[int, int] = (16, 64)
    """Of the list, drawn by lot: the shortest and the longest, multiples of 16."""
    kappa: float = 16.0
    """How much the reasoner can be given at once."""
    calls: int = 12
    price: float = 0.0
    horizon: int | None = None

    bounds: ClassVar[Mapping[str, str]] = {
        "sizes": "from 16 to 1024",
        "kappa": "above 0",
        "calls": "from 2 to 10000",
        "price": "at least 0",
        "horizon": "from 1 to 10000000",
    }
    solved = -0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.sizes
        if low > high or low % STEP or high % STEP or low < STEP:
            raise PanoplyError(
                f"thoughts.sizes are two multiples of {STEP}, the smaller one first, not {low},{high}."
            )

    @property
    def sees(self) -> Space:  # type: ignore[override]
        return Box((10 + len(NAMES),))

    @property
    def takes(self) -> Space:  # type: ignore[override]
        return Discrete(len(NAMES))

    def signals(self) -> frozenset[str]:
        return frozenset({"reward", "success", "error", "call"})

    # -------------------------------------------------------------- what happens

    def start(self, draws: Draws) -> State:
        low, high = (size // STEP for size in self.sizes)
        rows = len(draws.seeds)
        length = np.zeros((rows, SLOTS), np.int64)
        length[:, 0] = STEP * (low + draws.below(high - low + 1))
        return {
            "whole": length[:, 0].copy(),
            "length": length,
            "sorted": np.zeros((rows, SLOTS), bool),
            "wrong": np.zeros((rows, SLOTS), np.int64),
            "used": np.zeros(rows, np.int64),
            "last": np.full(rows, FINISH),
        }

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        new = {name: column.copy() for name, column in state.items()}
        luck, size = draws.uniform(), draws.uniform()
        for number, operation in enumerate(
            (self._split, self._solve, self._refine, self._again, self._merge)
        ):
            rows = np.flatnonzero(actions == number)
            if len(rows):
                operation(new, rows, luck[rows], size[rows])
        called = actions != FINISH
        new["used"], new["last"] = state["used"] + called, actions.copy()
        done = ~called | (new["used"] >= self.calls)
        finished = _finished(new)
        share = np.minimum(1.0, new["wrong"].sum(-1) / new["whole"])
        error = np.where(finished, share, 1.0)
        reward = np.where(done, -error, 0.0) - self.price * called
        signals = {
            "success": (done & finished & (share == 0)).astype(float),
            "error": np.where(done, error, 0.0),
            "call": called.astype(float),
        }
        return Moved(new, reward, done, signals)

    def _split(self, state: State, rows: Array, luck: Array, size: Array) -> None:
        at, free = _largest_open(state)[rows], (state["length"][rows] == 0).argmax(-1)
        half = state["length"][rows, at] // 2
        state["length"][rows, free] = half
        state["length"][rows, at] -= half

    def _solve(self, state: State, rows: Array, luck: Array, size: Array) -> None:
        at = _largest_open(state)[rows]
        state["wrong"][rows, at] = self._errors(state["length"][rows, at], luck, size)
        state["sorted"][rows, at] = True

    def _again(self, state: State, rows: Array, luck: Array, size: Array) -> None:
        at = _worst(state)[rows]
        other = self._errors(state["length"][rows, at], luck, size)
        state["wrong"][rows, at] = np.minimum(state["wrong"][rows, at], other)

    def _refine(self, state: State, rows: Array, luck: Array, size: Array) -> None:
        at = _worst(state)[rows]
        wrong, length = state["wrong"][rows, at], state["length"][rows, at]
        better = luck < 0.9 * np.exp(-length / (4 * self.kappa))
        worse = np.where(luck > 0.9, np.minimum(wrong + 1, length), wrong)
        state["wrong"][rows, at] = np.where(better, wrong // 2, worse)

    def _merge(self, state: State, rows: Array, luck: Array, size: Array) -> None:
        held = np.where(state["sorted"][rows], state["length"][rows], np.iinfo(np.int64).max)
        first, second = np.argsort(held, axis=-1, kind="stable")[:, :2].T
        length = state["length"][rows, first] + state["length"][rows, second]
        wrong = state["wrong"][rows, first] + state["wrong"][rows, second]
        missed = np.where(
            luck < np.exp(-length / (4 * self.kappa)), 0, 1 + (size * length / 8).astype(np.int64)
        )
        state["length"][rows, first], state["length"][rows, second] = length, 0
        state["wrong"][rows, first], state["wrong"][rows, second] = np.minimum(wrong + missed, length), 0
        state["sorted"][rows, second] = False

    def _errors(self, length: Array, luck: Array, size: Array) -> Array:
        """Of sorting so many numbers at once: none, or up to a quarter of them."""
        missed = 1 + (size * length / 4).astype(np.int64)
        errors: Array = np.where(luck < np.exp(-length / self.kappa), 0, missed)
        return errors

    # -------------------------------------------------------------- what is seen and may be done

    def look(self, state: State) -> Array:
        """How long the list is, calls left, how many nodes are open, right and wrong, the extremes, what came last."""
        length, done, wrong = state["length"], state["sorted"], state["wrong"]
        open_ = (length > 0) & ~done
        rows = np.arange(len(length))
        largest, worst = _largest_open(state), _worst(state)
        columns = [
            np.log2(state["whole"]) / 8,
            1 - state["used"] / self.calls,
            open_.sum(-1) / SLOTS,
            (done & (wrong == 0)).sum(-1) / SLOTS,
            (done & (wrong > 0)).sum(-1) / SLOTS,
            np.where(open_.any(-1), np.log2(np.maximum(length[rows, largest], 1)) / 8, 0.0),
            np.where(done.any(-1), np.log2(np.maximum(length[rows, worst], 1)) / 8, 0.0),
            np.log1p(wrong[rows, worst]) / 4,
            np.log1p(wrong.sum(-1)) / 4,
            _finished(state).astype(float),
        ]
        return np.concatenate([np.stack(columns, -1), np.eye(len(NAMES))[state["last"]]], -1).astype(
            np.float32
        )

    def allowed(self, state: State) -> Array:
        length, done = state["length"], state["sorted"]
        open_, any_done = ((length > 0) & ~done).any(-1), done.any(-1)
        largest = length[np.arange(len(length)), _largest_open(state)]
        can_split = open_ & (largest >= 2) & (length == 0).any(-1)
        can_merge = done.sum(-1) >= 2
        legal: Array = np.stack([can_split, open_, any_done, any_done, can_merge, _finished(state)], -1)
        return legal

    def expert(self, state: State) -> Array:
        """Pieces of at most 32, each mended until it is right, while calls are left to put all together."""
        length, done = state["length"], state["sorted"]
        open_ = (length > 0) & ~done
        largest = length[np.arange(len(length)), _largest_open(state)]
        needed = open_.sum(-1) + (length > 0).sum(-1) - 1
        spare = self.calls - state["used"] - needed
        can_split = open_.any(-1) & (largest > 2 * STEP) & (spare > 4) & (length == 0).any(-1)
        wrong = (state["wrong"] > 0).any(-1)
        many = done.sum(-1) >= 2
        steps: Array = np.select(
            [can_split, open_.any(-1), wrong & (spare > 0), many], [SPLIT, SOLVE, REFINE, MERGE], FINISH
        )
        return steps

    def picture(self, state: State, size: int = 240) -> Array:
        sheet = Canvas(size, (0, 1), (0, 1))
        whole, left = float(state["whole"][0]), 0.0
        for length, done, wrong in zip(
            state["length"][0], state["sorted"][0], state["wrong"][0], strict=True
        ):
            if length:
                wide = float(length) / whole
                colour = FAINT if not done else GREEN if not wrong else BLUE
                sheet.box((left + 0.005, 0.3), (left + wide - 0.005, 0.7), colour, 0.02)
                sheet.box((left + 0.005, 0.3), (left + 0.005 + wide * float(wrong) / float(length), 0.4), RED)
                left += wide
        sheet.box((0, 0.1), (1 - float(state["used"][0]) / self.calls, 0.15), INK)
        return sheet.pixels()


def _largest_open(state: State) -> Array:
    """The slot of the longest piece that is still to be sorted."""
    slot: Array = np.where(state["sorted"], 0, state["length"]).argmax(-1)
    return slot


def _worst(state: State) -> Array:
    """The slot of the sorted piece with most errors; among equals the longest."""
    held = state["sorted"]
    slot: Array = np.where(held, state["wrong"] * 2.0**20 + state["length"], -1.0).argmax(-1)
    return slot


def _finished(state: State) -> Array:
    """Whether all of the list is one sorted node."""
    found: Array = ((state["length"] > 0).sum(-1) == 1) & state["sorted"].any(-1)
    return found
