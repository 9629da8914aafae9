"""A combination lock: every place must be right, and only then is there a reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.text.characters import DIGITS, END, CharacterWorld, Draws
from panoply.worlds.world import Task

SMALL, LARGE = "abcdefghij", "ABCDEFGHIJ"
HELD_OUT = 8
"""One combination in so many is in the test split."""


@world("lock@1")
@dataclass(frozen=True)
class Lock(CharacterWorld):
    """`53028714=` asks for a letter a digit, a for 0, small for odd digits and large for even ones: `fdACIhbE$`.

    One wrong place, and the lock stays shut: `success` is all or nothing. The careless teacher knows every letter and
    tosses a coin for its size, so that a model which imitates it opens one lock of 2^places, here of 256. The data set
    is better: the `labeller` has a whole answer right with probability `right`, and otherwise the size of one letter
    wrong. Whoever begins near the end of such an answer has a good chance to open the lock; from the start alone there
    is nothing to learn from for a long time.
    """

    places: int = 8
    slip: float = 0.5
    """How often the careless teacher has the size of a letter wrong."""
    right: float = 0.8
    """How often the labeller's answer is right."""

    teachers: ClassVar[tuple[str, ...]] = ("reference", "careless", "labeller")
    bounds: ClassVar[Mapping[str, str]] = {
        "places": "from 2 to 16",
        "slip": "from 0 to 1",
        "right": "from 0 to 1",
    }
    access: ClassVar[frozenset[str]] = frozenset({"verify", "reference", "teacher", "pairs", "hint"})
    alphabet: ClassVar[str] = DIGITS + SMALL + LARGE + "="

    @property
    def max_tokens(self) -> int:
        return self.places + 1

    def task(self, split: str, index: int) -> Task:
        def draw(draws: Draws) -> Task | None:
            problem = "".join(DIGITS[draws.below(10)] for _ in range(self.places)) + "="
            id = stable_hash("lock", problem)
            if (id % HELD_OUT == 0) != (split == "test"):
                return None
            return Task(id, tuple(self.tokens(problem)), self.places, {"problem": problem})

        return self._first(split, index, draw)

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Beside `success`: `places`, the share of places that are right, which no lock tells; `ended`."""
        written, code = [*task.given, *answer], self._code(task)
        text, body = self.text(written), self.body(written)
        return {
            "success": float(body == code),
            "places": sum(a == b for a, b in zip(text, code, strict=False)) / self.places,
            "ended": float(body is not None),
        }

    def gold(self, task: Task) -> list[int]:
        return self.tokens(self._code(task)[len(task.given) :] + END)

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        return self._with_slips(task, rng.random(self.places) < self.slip)

    def teach(self, task: Task, teacher: str, rng: np.random.Generator) -> list[int]:
        if teacher != "labeller":
            return super().teach(task, teacher, rng)
        wrong, at = rng.random() >= self.right, int(rng.integers(self.places))
        return self._with_slips(task, np.arange(self.places) == (at if wrong else -1))

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also every answer with one letter of the wrong size."""
        places = range(len(task.given), self.places)
        return [
            *super().mistakes(task),
            *(self._with_slips(task, np.arange(self.places) == at) for at in places),
        ]

    def _code(self, task: Task) -> str:
        """The letters that open it."""
        digits = task.data["problem"][: self.places]
        return "".join((SMALL if int(d) % 2 else LARGE)[int(d)] for d in digits)

    def _with_slips(self, task: Task, slips: np.ndarray) -> list[int]:
        """The answer, with the size of some letters exchanged, from where the prompt ends."""
        letters = (c.swapcase() if slip else c for c, slip in zip(self._code(task), slips, strict=True))
        return self.tokens("".join(letters)[len(task.given) :] + END)
