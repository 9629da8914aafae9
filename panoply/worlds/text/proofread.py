"""Chains to be worked out, and solutions of others whose first wrong step is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import ClassVar

import numpy as np

from panoply.errors import PanoplyError, unknown
from panoply.registry import world
from panoply.seeds import numpy_rng, stable_hash
from panoply.worlds.presets import Preset
from panoply.worlds.text.chain import END, Chain, _steps
from panoply.worlds.world import Lesson, Task

ASKS, CLOSES, SOUND = "?", ";", "."
"""What stands before and behind a solution that is to be checked, and the answer that nothing in it is wrong."""
KINDS = ("solve", "check")


@world("proofread@1")
@dataclass(frozen=True)
class Proofread(Chain):
    """`3+4*2=` → `+47*24$`, as in `chain`, and `?3+4*2=+47*25;` → `2$`: which step of that solution is wrong first.

    Of a solution without a fault the answer is `.$`. Half of those that are shown have none; in the others a step at
    random is wrong, mostly a product that was done as a sum, and the rest goes on from there.

    The careless teacher checks as it solves: it does every step anew, `*` mostly as `+`, and names the first that
    differs from its own. So who imitates it takes right products for wrong ones, and the other way round, though sums
    are checked well. Imitation has both kinds of problem, half and half; training and tests have those of `kinds`, by
    default only problems to solve, so that what becomes of checking meanwhile can be seen.
    """

    operations: int = 4
    levels: tuple[int, int] | None = (0, 4)
    """Fewest and most signs beside `+` in a problem, all numbers between equally likely."""
    kinds: tuple[str, ...] = ("solve",)
    """Kinds of problem, in turn: `solve`, `check`."""

    bounds: ClassVar[Mapping[str, str]] = {**Chain.bounds, "operations": "from 1 to 9"}
    presets: ClassVar[Mapping[str, Preset]] = {}
    access: ClassVar[frozenset[str]] = Chain.access - {"knowledge", "plan"} | {"referee"}

    def __post_init__(self) -> None:
        super().__post_init__()
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown("kind of problem in proofread", kind, KINDS)
        if not self.kinds:
            raise PanoplyError("proofread.kinds names no kind of problem.")

    @property
    def start(self) -> str:
        return (
            "proofread-start" if self.layers == Chain.layers else f"proofread-start-of-{self.layers}-layers"
        )

    @property
    def _alphabet(self) -> str:
        return super()._alphabet + ASKS + CLOSES + SOUND

    @property
    def keys(self) -> frozenset[str]:  # type: ignore[override]
        return super().keys | ({"domain"} if len(self.kinds) > 1 else set())

    def part_of(self, task: Task) -> str:
        return (
            ("check" if "trace" in task.data else "solve") if len(self.kinds) > 1 else super().part_of(task)
        )

    # -------------------------------------------------------------- problems

    def task(self, split: str, index: int) -> Task:
        at, turn = divmod(index, len(self.kinds))
        task = super().task(split, at)
        if self.kinds[turn] == "solve":
            return task
        return self.check_of(task, self.solution(task, numpy_rng("proofread", split, at)))

    def checks(self, n: int) -> list[Task]:
        """Solutions to be checked of the first `n` held-out problems, whichever kinds are asked otherwise."""
        solving = [task for task in self.held_out(n * len(self.kinds)) if "trace" not in task.data]
        tasks = solving if len(solving) >= n else [Chain.task(self, "test", i) for i in range(n)]
        return [self.check_of(t, self.solution(t, numpy_rng("proofread", "test", t.id))) for t in tasks[:n]]

    def solution(self, task: Task, rng: np.random.Generator) -> str:
        """A right one, or one whose step at random is wrong: `*` done as `+` where that differs, or another digit."""
        problem, wrong = (
            task.data["problem"],
            int(rng.integers(self.operations)) if rng.random() < 0.5 else -1,
        )
        value, text = problem[0], ""
        for at, (operation, operand) in enumerate(_steps(problem)):
            right, other = self._apply(value, operation, operand), self._apply(value, "+", operand)
            astray = self._digit(int(right) + 1 + int(rng.integers(self.modulus - 1)))
            value = right if at != wrong else other if other != right and rng.random() < 0.75 else astray
            text += operation + operand + value
        return text

    def check_of(self, task: Task, trace: str) -> Task:
        """The question which step of this solution is the first wrong one; `first` is 0 where none is."""
        problem = task.data["problem"]
        prompt = f"{ASKS}{problem}{trace}{CLOSES}"
        right = self._judge(problem, trace)
        first = next((number for number, good in enumerate(right, 1) if not good), 0)
        data = {"problem": problem, "trace": trace, "first": first}
        return Task(
            stable_hash("proofread", self.modulus, prompt), tuple(self._tokens(prompt)), task.level, data
        )

    # -------------------------------------------------------------- checking

    def referee(self, task: Task, answers: Sequence[Sequence[int]]) -> Task | None:
        """The question about an answer to a problem; None of one that has not the form of a solution."""
        text = self._text(answers[0])
        shape = all(text[i::3][: self.operations].isdigit() for i in (1, 2)) and not set(text[:-1]) & {
            ASKS,
            CLOSES,
        }
        if (
            "trace" in task.data
            or not shape
            or len(text) != self.max_tokens
            or text.find(END) != len(text) - 1
        ):
            return None
        return self.check_of(task, text[:-1])

    def scores(self, task: Task, answer: Sequence[int]) -> list[float] | None:
        """1 where it finds nothing wrong, else 0; None where it says neither that nor a step."""
        found = self.located(answer)
        return None if found is None else [float(found == 0)]

    def located(self, answer: Sequence[int]) -> int | None:
        """The number of the step that an answer names, 0 for none; None where it names nothing."""
        text = self._text(answer)
        if text == SOUND + END:
            return 0
        named = int(text[0]) if len(text) == 2 and text[0].isdigit() and text[1] == END else 0
        return named if 1 <= named <= self.operations else None

    # -------------------------------------------------------------- answers

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Of a solution what `chain` says; of a check all signals but `ended` say whether it is right."""
        if "trace" not in task.data:
            return super().grade(task, answer)
        right = float(self._text(answer) == self._verdict(task.data["first"]))
        return {
            "success": right,
            "final": right,
            "steps": right,
            "ended": float(self._text(answer)[-1:] == END),
        }

    def judge(self, task: Task, answer: Sequence[int], rng: np.random.Generator) -> list[bool]:
        if "trace" not in task.data:
            return super().judge(task, answer, rng)
        return [bool(self.grade(task, answer)["success"])] * len(self.spans(task, answer))

    def gold(self, task: Task) -> list[int]:
        if "trace" not in task.data:
            return super().gold(task)
        return self._tokens(self._verdict(task.data["first"]))

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        if "trace" not in task.data:
            return super().demonstrate(task, rng)
        problem, trace = task.data["problem"], task.data["trace"]
        rates = dict(zip(self.signs, self.slips or repeat(self.slip), strict=False))
        value = problem[0]
        for number, (operation, operand) in enumerate(_steps(problem), 1):
            done = "+" if rng.random() < rates.get(operation, 0.0) else operation
            written = trace[3 * number - 1]
            if written != self._apply(value, done, operand):
                return self._tokens(self._verdict(number))
            value = written
        return self._tokens(self._verdict(0))

    def lessons(self, task: Task, rng: np.random.Generator) -> list[Lesson]:
        if "trace" not in task.data and rng.random() < 0.5:
            task = self.check_of(task, self.solution(task, rng))
        return [(task.prompt, self.demonstrate(task, rng))]

    def mistakes(self, task: Task) -> list[list[int]]:
        if "trace" not in task.data:
            return super().mistakes(task)
        gold = self.gold(task)
        other = self._verdict(0 if task.data["first"] else 1)
        return [[], gold[:-1], [*gold, *gold[-1:]], self._tokens(other)]

    def _verdict(self, first: int) -> str:
        return f"{first or SOUND}{END}"
