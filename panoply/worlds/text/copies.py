"""Copies of a word, counted down to none: answers of widely differing length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.text.characters import DIGITS, END, CharacterWorld, Draws
from panoply.worlds.world import Task

LETTERS = "abcdefghijklmnopqrstuvwxyz"
HELD_OUT = 8
"""One problem in so many is in the test split."""
ALIKE = 720720
"""The number of copies n is drawn with a chance that goes with 1/n, as whole numbers: this is divided by all to 16."""


@world("copies@1")
@dataclass(frozen=True)
class Copies(CharacterWorld):
    """`03ab=` asks for three copies of ab, each with how many are still to come: `ab02ab01ab00$`.

    Short answers are the most frequent: n copies are asked for with a chance that goes with 1/n, so that with the
    defaults an answer has 26 tokens on average and 65 at most. Sampling a batch to its end leaves most of it idle for
    most of the time. The careless teacher stops too early: after any copy but the last with a chance of `quits`, which
    makes 19 % of its answers right, and of those with sixteen copies one in ten thousand.
    """

    copies: tuple[int, int] = (2, 16)
    """Fewest and most copies of a problem."""
    quits: float = 0.45
    """How often the teacher stops after a copy that is not the last."""

    bounds: ClassVar[Mapping[str, str]] = {"copies": "from 1 to 99", "quits": "from 0 to 1"}
    access: ClassVar[frozenset[str]] = frozenset({"verify", "reference", "teacher", "pairs", "hint"})
    alphabet: ClassVar[str] = DIGITS + LETTERS + "="
    step_tokens: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.copies[0] > self.copies[1]:
            raise PanoplyError(
                f"copies.copies is a range, fewest first, not {self.copies[0]} to {self.copies[1]}."
            )

    @property
    def max_tokens(self) -> int:
        return self.step_tokens * self.copies[1] + 1

    @cached_property
    def _chances(self) -> list[int]:
        return list(accumulate(ALIKE // n for n in range(self.copies[0], self.copies[1] + 1)))

    def task(self, split: str, index: int) -> Task:
        def draw(draws: Draws) -> Task | None:
            at = draws.below(self._chances[-1])
            n = self.copies[0] + next(i for i, most in enumerate(self._chances) if at < most)
            word = LETTERS[draws.below(len(LETTERS))] + LETTERS[draws.below(len(LETTERS))]
            problem = f"{n:02d}{word}="
            id = stable_hash("copies", problem)
            if (id % HELD_OUT == 0) != (split == "test"):
                return None
            return Task(id, tuple(self.tokens(problem)), n, {"problem": problem, "copies": n, "word": word})

        return self._first(split, index, draw)

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Beside `success`: `ended`, and `copied`, the share of copies that are right up to the first that is not."""
        written = [*task.given, *answer]
        text, trace = self.text(written), self._trace(task)
        size, ended = self.step_tokens, self.body(written) is not None
        right = 0
        while right < task.data["copies"] and text[: size * (right + 1)] == trace[: size * (right + 1)]:
            right += 1
        return {
            "success": float(text == trace + END),
            "copied": right / task.data["copies"],
            "ended": float(ended),
        }

    def gold(self, task: Task) -> list[int]:
        return self._answer(task, self._trace(task))

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        stops = rng.random(self.copies[1]) < self.quits
        given = len(task.given) // self.step_tokens
        said = next((n for n in range(given + 1, task.data["copies"]) if stops[n - 1]), task.data["copies"])
        return self._answer(task, self._trace(task)[: self.step_tokens * said])

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also one copy too few, and one letter changed."""
        trace = self._trace(task)
        other = LETTERS[(LETTERS.index(trace[-4]) + 1) % len(LETTERS)]
        wrong = [trace[: -self.step_tokens], trace[:-4] + other + trace[-3:]]
        return [*super().mistakes(task), *(self.tokens(text + END) for text in wrong)]

    def _trace(self, task: Task) -> str:
        return "".join(f"{task.data['word']}{left:02d}" for left in reversed(range(task.data["copies"])))

    def _answer(self, task: Task, trace: str) -> list[int]:
        """The tokens of a trace that are not in the prompt yet."""
        return self.tokens(trace[len(task.given) :] + END)
