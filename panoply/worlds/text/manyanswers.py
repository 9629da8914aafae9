"""Problems with several right answers: pairs that sum to a number, and countdown."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.presets import Preset
from panoply.worlds.text.characters import DIGITS, END, CharacterWorld, Draws
from panoply.worlds.world import Task

SIGNS = "+-*"
MISTAKEN = {"+": "-", "-": "*", "*": "+"}
"""What a careless teacher of countdown writes for a sign."""
CARDS = 4
"""Digits dealt in countdown."""
HELD_OUT = {"pairs": 7, "countdown": 8}
"""One problem in so many is in the test split."""


@world("manyanswers@1")
@dataclass(frozen=True)
class ManyAnswers(CharacterWorld):
    """`37=` asks for two numbers that sum to 37, such as `12+25$`; any of the 38 pairs is right.

    The careless teacher draws the first number from the low end, x = ⌊(n+1)·u²⌋ with u uniform, and with
    probability 0.7 the second is one too many. Some right answers are likelier than others, and a method that raises
    success may do so by forgetting all but one of them: measure coverage, the number of different right answers,
    beside success.

    The other kind, `countdown`, deals four digits and a target: `2358>10=` asks for an expression over different
    digits of these that reaches it, such as `8+2$`. Expressions are read from left to right. The teacher takes one of
    the right ones, equally likely, and with probability 0.7 takes its last sign for another: + as -, - as *, * as +.
    """

    kind: Literal["pairs", "countdown"] = "pairs"
    low: int = 10
    high: int = 59
    """Of pairs: the numbers asked for, from `low` to `high`."""
    operations: int = 1
    """Of countdown: how many operations an answer has, 1 to 3."""
    slip: float = 0.7
    """How often the teacher spoils its answer."""

    bounds: ClassVar[Mapping[str, str]] = {
        "low": "from 0 to 100000",
        "high": "from 0 to 100000",
        "operations": "from 1 to 100",
        "slip": "from 0 to 1",
    }

    presets: ClassVar[Mapping[str, Preset]] = {
        "coverage": Preset(
            {"low": 10, "high": 99},
            "many right answers, of which a policy soon knows few: diversity, pass@k, entropy",
            0.21,
            budget="steps=80",
        )
    }

    access: ClassVar[frozenset[str]] = frozenset({"verify", "reference", "teacher", "pairs"})
    alphabet: ClassVar[str] = DIGITS + SIGNS + ">="

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.low <= self.high <= 999:
            raise PanoplyError(
                f"manyanswers.low and high are a range within 1 to 999, not {self.low} to {self.high}."
            )
        if self.operations >= CARDS:
            raise PanoplyError(f"manyanswers.operations is between 1 and {CARDS - 1}, not {self.operations}.")

    @property
    def start(self) -> str:
        return "manyanswers-start" if self.kind == "pairs" else "manyanswers-countdown-start"

    @property
    def max_tokens(self) -> int:
        return 2 * len(str(self.high)) + 3 if self.kind == "pairs" else 2 * self.operations + 2

    def task(self, split: str, index: int) -> Task:
        def draw(draws: Draws) -> Task | None:
            problem = self._pairs(draws) if self.kind == "pairs" else self._countdown(draws)
            return None if self._is_held_out(problem) != (split == "test") else self._task(problem)

        return self._first(split, index, draw)

    def held_out(self, n: int) -> list[Task]:
        """Pairs has few numbers to hold out: they come round again, to be answered anew each time."""
        if self.kind == "countdown":
            return super().held_out(n)
        problems = (f"{n}=" for n in range(self.low, self.high + 1))
        return _in_turn([self._task(p) for p in problems if self._is_held_out(p)], n, self.name)

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Beside `success`: `ended`, and `formed`, the answer has the form asked for, right or wrong."""
        body = self.body(answer)
        formed = body is not None and self._formed(task.data["problem"], body)
        return {
            "success": float(body is not None and formed and self._right(task.data["problem"], body)),
            "formed": float(formed),
            "ended": float(body is not None),
        }

    def answers(self, task: Task) -> list[list[int]]:
        """All right answers, as they may be written: `2+8` and `8+2` are two of them."""
        return [self.tokens(text + END) for text in self._answers(task.data["problem"])]

    def coverage(self, task: Task, answers: Iterable[Sequence[int]]) -> int:
        """How many different right answers there are among these."""
        return len({tuple(a) for a in answers if self.grade(task, a)["success"]})

    def gold(self, task: Task) -> list[int]:
        """One of the right answers, always the same."""
        found = self._answers(task.data["problem"])
        return self.tokens(found[task.id % len(found)] + END)

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        problem = task.data["problem"]
        if self.kind == "countdown":
            right = self._answers(problem)
            text = right[int(rng.integers(len(right)))]
            slips = rng.random() < self.slip
            return self.tokens((text[:-2] + MISTAKEN[text[-2]] + text[-1] if slips else text) + END)
        n = int(problem[:-1])
        x = int((n + 1) * rng.random() ** 2)
        return self.tokens(f"{x}+{n - x + (rng.random() < self.slip)}{END}")

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also a right answer with its last digit changed, and with a digit too many."""
        text = self.text(self.gold(task))[:-1]
        changed = (text[:-1] + DIGITS[(int(text[-1]) + by) % 10] for by in range(1, 10))
        wrong = [t for t in changed if t not in self._answers(task.data["problem"])]
        return [*super().mistakes(task), *(self.tokens(t + END) for t in [*wrong, f"0{text}", f"{text}0"])]

    def _task(self, problem: str) -> Task:
        level = 0 if self.kind == "pairs" else self.operations
        id = stable_hash("manyanswers", self.kind, level, problem)
        return Task(id, tuple(self.tokens(problem)), level, {"problem": problem})

    def _is_held_out(self, problem: str) -> bool:
        """Every seventh number of pairs, so that all last digits are seen; of countdown by the digits dealt."""
        if self.kind == "pairs":
            return int(problem[:-1]) % HELD_OUT["pairs"] == 5
        return stable_hash("countdown", problem[:CARDS]) % HELD_OUT["countdown"] == 0

    def _pairs(self, draws: Draws) -> str:
        return f"{self.low + draws.below(self.high - self.low + 1)}="

    def _countdown(self, draws: Draws) -> str:
        """Digits from 1 to 9 in order, and a target that some expression over them reaches."""
        dealt = "".join(sorted(DIGITS[1 + draws.below(9)] for _ in range(CARDS)))
        targets = sorted(_reached(dealt, self.operations))
        return f"{dealt}>{targets[draws.below(len(targets))]}="

    def _answers(self, problem: str) -> Sequence[str]:
        if self.kind == "pairs":
            n = int(problem[:-1])
            return [f"{x}+{n - x}" for x in range(n + 1)]
        return _reached(problem[:CARDS], self.operations)[int(problem[CARDS + 1 : -1])]

    def _formed(self, problem: str, body: str) -> bool:
        if self.kind == "pairs":
            x, plus, y = body.partition("+")
            return bool(plus) and all(s.isdigit() and str(int(s)) == s for s in (x, y))
        digits, signs = body[::2], body[1::2]
        spare = list(problem[:CARDS])
        for digit in digits:
            if digit not in spare:
                return False
            spare.remove(digit)
        return len(digits) == self.operations + 1 == len(signs) + 1 and all(s in SIGNS for s in signs)

    def _right(self, problem: str, body: str) -> bool:
        if self.kind == "pairs":
            x, y = body.split("+")
            return int(x) + int(y) == int(problem[:-1])
        return _value(body) == int(problem[CARDS + 1 : -1])


def _in_turn(tasks: list[Task], n: int, name: str) -> list[Task]:
    if not tasks:
        raise PanoplyError(f"{name} has no problems to hold out with these options.")
    return list(itertools.islice(itertools.cycle(tasks), n))


@lru_cache(maxsize=4096)
def _reached(dealt: str, operations: int) -> dict[int, list[str]]:
    """The numbers from 1 to 99 that expressions over different ones of the digits dealt reach, and by which."""
    found: dict[int, list[str]] = {}
    for digits in sorted(set(itertools.permutations(dealt, operations + 1))):
        for signs in itertools.product(SIGNS, repeat=operations):
            text = digits[0] + "".join(s + d for s, d in zip(signs, digits[1:], strict=True))
            if 1 <= (value := _value(text)) <= 99:
                found.setdefault(value, []).append(text)
    return found


def _value(text: str) -> int:
    """`8+2*5` read from left to right: 50."""
    value = int(text[0])
    for sign, digit in zip(text[1::2], text[2::2], strict=True):
        d = int(digit)
        value = value + d if sign == "+" else value - d if sign == "-" else value * d
    return value
