"""Minesweeper: open every cell that hides no mine, by the numbers of those that were opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.worlds.control.drawing import BLUE, FAINT, INK, RED, Canvas
from panoply.worlds.control.simulated import Draws, Moved, Simulated, State
from panoply.worlds.control.world import Array, Box, Discrete, Space

KINDS = 10
"""What a cell shows: one of the numbers 0 to 8, or nothing yet."""


@world("minesweeper@1")
@dataclass(frozen=True)
class Minesweeper(Simulated):
    """A square of `size` × `size` cells, `mines` of which end the episode when they are opened.

    An opened cell shows how many of its eight neighbours are mines; where that is none, its neighbours open too. Each
    cell that opens pays its share of all that can, so that a return of 1 is a board solved. One safe cell is open at
    the beginning. Only closed cells are legal. The expert knows where the mines are.
    """

    size: int = 4
    mines: int = 3
    horizon: int | None = None

    bounds: ClassVar[Mapping[str, str]] = {
        "size": "from 2 to 100",
        "mines": "from 0 to 10000",
        "horizon": "from 1 to 10000000",
    }

    solved = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 2 or not 1 <= self.mines < self.size**2 - 1:
            raise PanoplyError(
                f"minesweeper has at least 2 × 2 cells and two safe ones, not {self.mines} mines on {self.size}²."
            )

    @property
    def sees(self) -> Space:  # type: ignore[override]
        return Box((self.size, self.size, KINDS))

    @property
    def takes(self) -> Space:  # type: ignore[override]
        return Discrete(self.size**2)

    def signals(self) -> frozenset[str]:
        return frozenset({"reward", "success"})

    def start(self, draws: Draws) -> State:
        order = draws.uniform(self.size**2).argsort(-1)
        mines = np.zeros(order.shape, bool)
        np.put_along_axis(mines, order[:, : self.mines], True, -1)
        opened = np.zeros(order.shape, bool)
        np.put_along_axis(opened, order[:, self.mines : self.mines + 1], True, -1)
        return {"mines": mines, "opened": opened}

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        mines, before = state["mines"], state["opened"]
        chosen = np.eye(self.size**2, dtype=bool)[actions]
        exploded = np.logical_or.reduce(chosen & mines, -1)
        opened = self._spread(before | (chosen & ~mines), mines)
        won = np.logical_and.reduce(opened | mines, -1)
        reward = (opened & ~before).sum(-1) / (self.size**2 - self.mines - 1)
        return Moved(
            {"mines": mines, "opened": opened}, reward, exploded | won, {"success": won.astype(float)}
        )

    def look(self, state: State) -> Array:
        shown = np.where(state["opened"], self.counts(state["mines"]), KINDS - 1)
        seen: Array = np.eye(KINDS, dtype=np.float32)[shown].reshape(-1, self.size, self.size, KINDS)
        return seen

    def allowed(self, state: State) -> Array:
        closed: Array = ~state["opened"]
        return closed

    def expert(self, state: State) -> Array:
        """The first closed cell without a mine."""
        first: Array = (~state["opened"] & ~state["mines"]).argmax(-1)
        return first

    def counts(self, mines: Array) -> Array:
        """[rows, cells] how many neighbours of each cell are mines."""
        around: Array = self._around(mines) - mines
        return around

    def _around(self, cells: Array) -> Array:
        """Sums over squares of three by three."""
        n = self.size
        framed = np.pad(cells.reshape(-1, n, n).astype(np.int64), ((0, 0), (1, 1), (1, 1)))
        total = sum(framed[:, i : i + n, j : j + n] for i in range(3) for j in range(3))
        return np.asarray(total).reshape(len(cells), -1)

    def _spread(self, opened: Array, mines: Array) -> Array:
        """Around an open cell without mines next to it all is open, and so on."""
        empty = self.counts(mines) == 0
        while True:
            more = opened | (self._around(opened & empty) > 0) & ~mines
            if (more == opened).all():
                return opened
            opened = more

    def picture(self, state: State, size: int = 240) -> Array:
        n = self.size
        sheet = Canvas(size, (0, n), (0, n))
        counts = self.counts(state["mines"])[0]
        for cell in range(n * n):
            x, y = cell % n, n - 1 - cell // n
            colour = INK if not state["opened"][0, cell] else FAINT
            sheet.box((x + 0.05, y + 0.05), (x + 0.95, y + 0.95), colour, 0.05)
            if state["opened"][0, cell]:
                for dot in range(int(counts[cell])):
                    sheet.disc((x + 0.25 + 0.25 * (dot % 3), y + 0.75 - 0.25 * (dot // 3)), 0.09, BLUE)
            elif state["mines"][0, cell]:
                sheet.disc((x + 0.5, y + 0.5), 0.12, RED)
        return sheet.pixels()
