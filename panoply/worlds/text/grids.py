"""Small pictures as tokens: cells of a grid, and questions about one row or one column of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.text.characters import DIGITS, END, CharacterWorld, Draws
from panoply.worlds.world import Task

OPEN, BLANK, CLOSE = "<_>"
"""Begin what is looked at, stand for what is seen there without being written, and end it."""
HELD_OUT = 8
"""One problem in so many is in the test split."""


@world("grids@1")
@dataclass(frozen=True)
class Grids(CharacterWorld):
    """`0110100111000101r1=` is a grid of 4 × 4 cells, read row by row, and asks how many in row 1 are 1: `<1001>2$`.

        0 1 1 0
        1 0 0 1    row 1, counted from 0
        1 1 0 0
        0 1 0 1

    Between `<` and `>` stands what is looked at: the cells themselves, or as many blanks (`<____>2$`), or nothing at
    all (`2$`); only the number counts. The careless teacher looks in the wrong place: with a chance of `slip` it takes
    the next row or column, after the last the first.
    """

    side: int = 4
    """Rows of the grid, and columns."""
    slip: float = 0.65
    """How often the teacher looks at the next row or column."""

    bounds: ClassVar[Mapping[str, str]] = {"side": "from 2 to 8", "slip": "from 0 to 1"}
    access: ClassVar[frozenset[str]] = frozenset({"verify", "reference", "teacher", "pairs", "looks"})
    alphabet: ClassVar[str] = DIGITS + "rc=" + OPEN + BLANK + CLOSE

    @property
    def max_tokens(self) -> int:
        return self.side + 4

    def task(self, split: str, index: int) -> Task:
        def draw(draws: Draws) -> Task | None:
            cells = "".join(DIGITS[draws.below(2)] for _ in range(self.side**2))
            line, number = "rc"[draws.below(2)], draws.below(self.side)
            problem = f"{cells}{line}{number}="
            id = stable_hash("grids", problem)
            if (id % HELD_OUT == 0) != (split == "test"):
                return None
            return Task(id, tuple(self.tokens(problem)), 0, {"cells": cells, "line": line, "number": number})

        return self._first(split, index, draw)

    def looked_at(self, task: Task, further: int = 0) -> str:
        """The cells of the row or column asked for, or of one so much further on."""
        n, cells = self.side, task.data["cells"]
        at = (task.data["number"] + further) % n
        found: str = cells[at * n : at * n + n] if task.data["line"] == "r" else cells[at::n]
        return found

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Beside `success`: `looked`, whether something stands between `<` and `>`, and `ended`."""
        body = self.body(answer)
        before, looked, rest = (body or "").partition(OPEN)
        seen, closed, said = rest.partition(CLOSE)
        said = said if looked else before
        fits = not looked or (before == "" and bool(closed) and len(seen) == self.side)
        right = str(self.looked_at(task).count("1"))
        return {
            "success": float(body is not None and fits and said == right),
            "looked": float(bool(looked)),
            "ended": float(body is not None),
        }

    def gold(self, task: Task) -> list[int]:
        return self._answer(self.looked_at(task))

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        return self._answer(self.looked_at(task, int(rng.random() < self.slip)))

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also one too many, and what is looked at left open."""
        cells = self.looked_at(task)
        texts = (f"{OPEN}{cells}{CLOSE}{cells.count('1') + 1}", f"{OPEN}{cells}{cells.count('1')}")
        return [*super().mistakes(task), *(self.tokens(text + END) for text in texts)]

    def _answer(self, cells: str) -> list[int]:
        return self.tokens(f"{OPEN}{cells}{CLOSE}{cells.count('1')}{END}")
