"""Look-ups one after another in a table, in one turn that is too short to write all of them down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.text.characters import DIGITS, END, CharacterWorld, Draws
from panoply.worlds.world import Task

LETTERS = "abcdefghijkl"
MARKER = "#"
"""Between thoughts and the answer."""
HELD_OUT = 8
"""One problem in so many is in the test split."""


@world("hops@1")
@dataclass(frozen=True)
class Hops(CharacterWorld):
    """`adbacedbebfa,c3=` is a table (a→d, b→a, c→e, …) and asks where three hops from c lead: `eb#a$`.

    What stands before `#` are thoughts, at most `thoughts` of them and any letters; only the letter after it counts.
    With the defaults an answer has six tokens at most, so that five hops cannot all be written down: one has to be made
    in the head. The careless teacher loses count: with a chance of `slip` it makes one hop too few.
    """

    hops: tuple[int, int] = (2, 5)
    """Fewest and most hops of a problem."""
    letters: int = 6
    """Rows of the table."""
    thoughts: int = 3
    """Tokens that may stand before the marker."""
    slip: float = 0.6
    """How often the teacher makes one hop too few."""

    bounds: ClassVar[Mapping[str, str]] = {
        "hops": "from 1 to 9", "letters": "from 3 to 12", "thoughts": "from 0 to 16", "slip": "from 0 to 1"
    }  # fmt: skip
    access: ClassVar[frozenset[str]] = frozenset({"verify", "reference", "teacher", "pairs"})
    alphabet: ClassVar[str] = DIGITS + LETTERS + ",=" + MARKER

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hops[0] > self.hops[1]:
            raise PanoplyError(f"hops.hops is a range, fewest first, not {self.hops[0]} to {self.hops[1]}.")

    @property
    def max_tokens(self) -> int:
        return self.thoughts + 3

    def task(self, split: str, index: int) -> Task:
        def draw(draws: Draws) -> Task | None:
            n, (fewest, most) = self.letters, self.hops
            to = [draws.below(n - 1) for _ in range(n)]
            table = {LETTERS[i]: LETTERS[j + (j >= i)] for i, j in enumerate(to)}  # nothing leads to itself
            hops, start = fewest + draws.below(most - fewest + 1), LETTERS[draws.below(n)]
            problem = "".join(a + b for a, b in table.items()) + f",{start}{hops}="
            id = stable_hash("hops", problem)
            if (id % HELD_OUT == 0) != (split == "test"):
                return None
            data = {"problem": problem, "table": table, "start": start, "hops": hops}
            return Task(id, tuple(self.tokens(problem)), hops, data)

        return self._first(split, index, draw)

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Beside `success`: `thoughts`, how many tokens came before the marker, and `ended`."""
        text, body = self.text(answer), self.body(answer)
        right = self._trace(task, task.data["hops"])[-1]
        before, marked, after = (body or "").partition(MARKER)
        return {
            "success": float(bool(marked) and len(before) <= self.thoughts and after == right),
            "thoughts": float(len(text.partition(MARKER)[0])),
            "ended": float(body is not None),
        }

    def gold(self, task: Task) -> list[int]:
        return self.tokens(self._trace(task, task.data["hops"]) + END)

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        fewer = task.data["hops"] > 1 and bool(rng.random() < self.slip)
        return self.tokens(self._trace(task, task.data["hops"] - fewer) + END)

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also one hop too few or none, and another letter where the answer stands."""
        trace = self._trace(task, task.data["hops"])
        other = LETTERS[(LETTERS.index(trace[-1]) + 1) % self.letters]
        wrong = [trace[:-1] + other, trace[:-2], "a" * (self.thoughts + 1) + trace[-2:]]
        return [*super().mistakes(task), *(self.tokens(text + END) for text in wrong)]

    @staticmethod
    def _path(table: Mapping[str, str], start: str, hops: int) -> list[str]:
        """Where one is before any hop, after one, after two, …"""
        path = [start]
        for _ in range(hops):
            path.append(table[path[-1]])
        return path

    def _trace(self, task: Task, hops: int) -> str:
        """The first hops that may be written down, the marker, and where the last leads."""
        path = self._path(task.data["table"], task.data["start"], hops)
        return "".join(path[1:-1][: self.thoughts]) + MARKER + path[-1]
