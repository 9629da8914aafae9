"""Addition of numbers of several digits, column by column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.text.annotators import StepAnnotators
from panoply.worlds.text.characters import DIGITS, END, CharacterWorld, Draws
from panoply.worlds.world import Task

HELD_OUT = 8
"""One pair of numbers in so many is in the test split, whichever of the two comes first."""


@world("add@1")
@dataclass(frozen=True)
class Add(CharacterWorld, StepAnnotators):
    """`47+85=` is worked out column by column, from the right: `75214831$`.

    A step restates the column's two digits, then gives the digit below the line and the carry: 7+5 = 12 is `7521`, and
    4+8 with that 1 carried is 13, `4831`. Read backwards, the sum is 132. The careless teacher drops carries: it
    writes 0 where 1 is to be carried and goes on from there. With the defaults 38 % of its answers are right; a
    teacher that always slips has 24 %, the problems without a carry.
    """

    digits: int = 2
    slip: float = 0.75
    """How often the teacher drops a carry."""
    levels: tuple[int, int] | None = None
    """Fewest and most carries of a problem; none means any number, as they come."""
    strict: bool = True
    """Success means that every step is right; otherwise that the sum is."""
    sharpness: float = 12.0
    """An annotator prefers a to b with probability σ(sharpness · difference of worth)."""
    noise: float = 0.0
    """How often an annotator says the opposite of what was meant."""

    bounds: ClassVar[Mapping[str, str]] = {
        **StepAnnotators.annotator_bounds,
        "digits": "from 1 to 8",
        "slip": "from 0 to 1",
        "levels": "from 0 to 8",
    }

    access: ClassVar[frozenset[str]] = frozenset(
        {"verify", "reference", "teacher", "pairs", "hint", "prefer", "preference"}
    )
    alphabet: ClassVar[str] = DIGITS + "+="
    step_tokens: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.levels is not None and not 0 <= self.levels[0] <= self.levels[1] <= self.digits:
            low, high = self.levels
            raise PanoplyError(
                f"add.levels is a range within 0 to {self.digits}, the digits, not {low} to {high}."
            )

    @property
    def max_tokens(self) -> int:
        return self.step_tokens * self.digits + 1

    def task(self, split: str, index: int) -> Task:
        least = 10 ** (self.digits - 1) if self.digits > 1 else 0

        def draw(draws: Draws) -> Task | None:
            a, b = (least + draws.below(10**self.digits - least) for _ in range(2))
            if (stable_hash("add", min(a, b), max(a, b)) % HELD_OUT == 0) != (split == "test"):
                return None
            problem = f"{a}+{b}="
            carries = self._trace(problem)[3::4].count("1")
            if self.levels is not None and not self.levels[0] <= carries <= self.levels[1]:
                return None
            return Task(
                stable_hash("add", problem), tuple(self.tokens(problem)), carries, {"problem": problem}
            )

        return self._first(split, index, draw)

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Beside `success`: `ended`; `final`, the sum is right; `steps`, the share of right steps.

        A step is judged by the carry written before it, so one error does not spoil the steps after it.
        """
        problem = task.data["problem"]
        written = [*task.given, *answer]
        text, trace = self.text(written).rstrip(END), self._trace(problem)
        ended = self.body(written) is not None
        final = ended and len(text) == len(trace) and _total(text) == _total(trace)
        return {
            "success": float(ended and text == trace if self.strict else final),
            "final": float(final),
            "steps": sum(self._judge(problem, text)) / self.digits,
            "ended": float(ended),
        }

    def gold(self, task: Task) -> list[int]:
        return self._answer(task, self._trace(task.data["problem"]))

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        slips = (rng.random(self.digits) < self.slip).tolist()
        hinted = len(task.given) // self.step_tokens
        return self._answer(task, self._trace(task.data["problem"], [False] * hinted + slips[hinted:]))

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also the answers with one digit below the line, or the last carry, changed."""
        trace, size = self._trace(task.data["problem"]), self.step_tokens
        places = [*range(size - 2, len(trace), size), len(trace) - 1]
        changed = (trace[:at] + DIGITS[(int(trace[at]) + 1) % 10] + trace[at + 1 :] for at in places)
        return [*super().mistakes(task), *(self._answer(task, text) for text in changed)]

    def _trace(self, problem: str, slips: Sequence[bool] = ()) -> str:
        """The steps of an answer. A slip writes 0 for the carry, and the next step goes on from there."""
        carry, text = 0, ""
        for place, (a, b) in enumerate(_columns(problem)):
            carry, digit = divmod(int(a) + int(b) + carry, 10)
            if place < len(slips) and slips[place]:
                carry = 0
            text += f"{a}{b}{digit}{carry}"
        return text

    def _judge(self, problem: str, text: str) -> Iterator[bool]:
        """Whether each step is the problem's and follows from the carry written before it."""
        carry = "0"
        for place, (a, b) in enumerate(_columns(problem)):
            step = text[self.step_tokens * place : self.step_tokens * (place + 1)]
            total = int(a) + int(b) + (carry == "1")
            yield carry in ("0", "1") and step == f"{a}{b}{total % 10}{total // 10}"
            carry = step[-1:]

    def _answer(self, task: Task, trace: str) -> list[int]:
        """The tokens of a whole trace that are not in the prompt yet."""
        return self.tokens(trace[len(task.given) :] + END)


def _columns(problem: str) -> Iterator[tuple[str, str]]:
    """`47+85=` → `75`, `48`: the digits that stand above each other, from the right."""
    a, b = problem[:-1].split("+")
    return zip(reversed(a), reversed(b), strict=True)


def _total(trace: str) -> str:
    """The sum as it is read off the steps: the last carry, then the digits from the last step to the first."""
    return trace[-1:] + trace[2::4][::-1]
