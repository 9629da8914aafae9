"""Chains of sums and products that may be written in several right ways, one of which is a trap on some problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.presets import Preset
from panoply.worlds.text.characters import DIGITS, END, CharacterWorld, Draws
from panoply.worlds.world import Task

STYLES = {
    "A": "{sign}{by}{result}",
    "B": "{by}{sign}{result}",
    "C": "{value}{sign}{by}{result}",
    "D": "{sign}{by}{result}",
}
"""How a step is written in each style; in D numbers are letters, a for 0."""
LETTERS = "abcdefghij"
IN_LETTERS = str.maketrans(DIGITS, LETTERS)
HELD_OUT = 8
"""One problem in so many is in the test split."""


@world("styles@1")
@dataclass(frozen=True)
class Styles(CharacterWorld):
    """`3+4*2=` is worked out from left to right, modulo 10, in a style that the first letter names.

        A+47*24=4$      sign, operand, result
        B4+72*4=4$      operand, sign, result
        C3+477*24=4$    the value so far, sign, operand, result
        D+eh*ce=4$      as A, in letters: a is 0

    Each is right, but for a trap: where the problem begins with an even digit, answers in style A are wrong, however
    well they are worked out. A teacher a style solves every problem in its own (`solutions`). The careless teacher that
    a start imitates does `*` as `+` nine times in ten; it writes A seven times in ten, whatever the problem begins
    with, and never D, so that a policy finds D's answers as hard to follow as a foreign language. After the steps
    comes the answer by itself: how likely a policy finds it tells how well it has understood the steps.
    """

    operations: int = 6
    levels: tuple[int, int] = (0, 2)
    """Fewest and most products in a problem, all numbers between equally likely."""
    slip: float = 0.9
    """How often the careless teacher does `*` as `+`."""
    habit: tuple[float, ...] = (0.7, 0.15, 0.15, 0.0)
    """How often it writes in each of the styles A, B, C and D."""
    traps: bool = True
    """Whether style A is wrong where a problem begins with an even digit."""

    teachers: ClassVar[tuple[str, ...]] = ("reference", "careless", *STYLES, "native")
    """Who writes in one style never slips; `native` writes in any but D, and slips in one product of ten."""
    keys: ClassVar[frozenset[str]] = frozenset({"domain"})
    bounds: ClassVar[Mapping[str, str]] = {
        "operations": "from 1 to 16",
        "levels": "from 0 to 16",
        "slip": "from 0 to 1",
        "habit": "from 0 to 1",
    }
    presets: ClassVar[Mapping[str, Preset]] = {
        "wall": Preset(
            {"levels": (4, 6)},
            "no group has a right answer, and four teachers could help, one of them in a foreign style",
            0.0,
        ),
    }
    access: ClassVar[frozenset[str]] = frozenset(
        {"verify", "reference", "teacher", "teachers", "pairs", "conclusion"}
    )
    alphabet: ClassVar[str] = DIGITS + "+*=" + "".join(STYLES) + LETTERS

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.levels
        if not low <= high <= self.operations:
            raise PanoplyError(
                f"styles.levels is a range within 0 to {self.operations}, the operations, not {low} to {high}."
            )
        if len(self.habit) != len(STYLES) or abs(sum(self.habit) - 1) > 1e-6:
            raise PanoplyError(
                f"styles.habit has a number for each of the styles {', '.join(STYLES)}, 1 in all, unlike "
                f"{', '.join(f'{h:g}' for h in self.habit)}."
            )

    @property
    def max_tokens(self) -> int:
        return 1 + 4 * self.operations + 3

    def part_of(self, task: Task) -> str:
        """`trapped`, or `plain`."""
        return "trapped" if self._traps(task.data["problem"]) else "plain"

    def task(self, split: str, index: int) -> Task:
        def draw(draws: Draws) -> Task | None:
            low, high = self.levels
            products = left = low + draws.below(high - low + 1)
            problem = DIGITS[draws.below(10)]
            for places in range(self.operations, 0, -1):
                product = draws.below(places) < left
                problem += ("*" if product else "+") + DIGITS[draws.below(10)]
                left -= product
            id = stable_hash("styles", problem)
            if (id % HELD_OUT == 0) != (split == "test"):
                return None
            return Task(id, tuple(self.tokens(problem + "=")), products, {"problem": problem})

        return self._first(split, index, draw)

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Beside `success`: `worked`, right but for a trap; `final`, it ends on the right answer; `ended`."""
        problem, body = task.data["problem"], self.body(answer)
        style = (body or "")[:1]
        worked = style in STYLES and body == self._written(problem, style)
        return {
            "success": float(worked and not (style == "A" and self._traps(problem))),
            "worked": float(worked),
            "final": float(body is not None and body[-2:] == f"={self._results(problem)[-1]}"),
            "ended": float(body is not None),
        }

    def gold(self, task: Task, style: str | None = None) -> list[int]:
        """The reference answer: in style A, or B where that is a trap; or in a style that is asked for."""
        style = style or ("B" if self._traps(task.data["problem"]) else "A")
        return self.tokens(self._written(task.data["problem"], style) + END)

    def solutions(self, task: Task) -> list[list[int]]:
        """Of every teacher whose style is right here, in the order of the styles."""
        return [
            self.gold(task, style)
            for style in STYLES
            if style != "A" or not self._traps(task.data["problem"])
        ]

    def demonstrate(self, task: Task, rng: np.random.Generator, style: str | None = None) -> list[int]:
        style = style or str(rng.choice(list(STYLES), p=self.habit))
        slips = (rng.random(self.operations) < self.slip).tolist()
        return self.tokens(self._written(task.data["problem"], style, slips) + END)

    def teach(self, task: Task, teacher: str, rng: np.random.Generator) -> list[int]:
        if teacher in STYLES:
            return self.gold(task, teacher)
        if teacher == "native":
            style, slips = "ABC"[int(rng.integers(3))], (rng.random(self.operations) < 0.1).tolist()
            return self.tokens(self._written(task.data["problem"], style, slips) + END)
        return super().teach(task, teacher, rng)

    def conclusion(self, task: Task) -> tuple[list[int], list[int]]:
        return self.tokens("="), self.tokens(self._results(task.data["problem"])[-1] + END)

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also another style's letter, another final answer, and what is caught in the trap."""
        gold = self.text(self.gold(task))
        other = DIGITS[(int(gold[-2]) + 1) % 10]
        wrong = ["C" + gold[1:], gold[:-2] + other + END, gold[:-3] + END]
        if self._traps(task.data["problem"]):
            wrong.append(self._written(task.data["problem"], "A") + END)
        return [*super().mistakes(task), *(self.tokens(text) for text in wrong)]

    def _traps(self, problem: str) -> bool:
        return self.traps and int(problem[0]) % 2 == 0

    def _results(self, problem: str, slips: Sequence[bool] | None = None) -> str:
        """The value after each step. A slip does `*` as `+`, and the next step goes on from there."""
        value, text = int(problem[0]), ""
        for (sign, by), slip in zip(_steps(problem), slips or repeat(False), strict=False):
            value = (value * int(by) if sign == "*" and not slip else value + int(by)) % 10
            text += DIGITS[value]
        return text

    def _written(self, problem: str, style: str, slips: Sequence[bool] | None = None) -> str:
        results = self._results(problem, slips)
        steps = "".join(
            STYLES[style].format(value=value, sign=sign, by=by, result=result)
            for (sign, by), value, result in zip(_steps(problem), problem[0] + results, results, strict=False)
        )
        return f"{style}{steps.translate(IN_LETTERS) if style == 'D' else steps}={results[-1]}"


def _steps(problem: str) -> Iterator[tuple[str, str]]:
    """`3+4*2` → `+4`, `*2`."""
    return zip(problem[1::2], problem[2::2], strict=True)
