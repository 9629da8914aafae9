"""Chains of one-digit sums and products, worked out step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import shake_256
from itertools import accumulate, repeat
from typing import Any, ClassVar

import numpy as np

from panoply.errors import PanoplyError, plain, unknown
from panoply.policies.tokenizer import Tokenizer
from panoply.registry import world
from panoply.seeds import stable_hash
from panoply.worlds.measures import measures
from panoply.worlds.presets import Preset
from panoply.worlds.text.annotators import StepAnnotators
from panoply.worlds.world import SPLITS, Task

DIGITS, END = "0123456789", "$"
KINDS = {"+": "sums", "*": "products", "-": "differences"}
"""What a problem is called that has a sign beside `+`, or `+` alone."""
HARD = {"operations": 8, "slip": 0.9}
"""The settings of `chain-hard-start` and, with as many layers as `DEEP`, of `chain-deep-start`."""
DEEP = 4
HELD_OUT = 8
"""One problem in so many is in the test split."""
HARDEST = 128
"""Held-out problems of the hardest levels on which `world:hardest` is measured."""


@world("chain@1")
@dataclass(frozen=True)
class Chain(StepAnnotators):
    """`3+4*2=` is worked out from left to right, modulo 10: `+47*24$`.

    Each step of the answer restates the operation and its operand and gives the running result. The careless
    teacher does `*` as `+`, so a model that imitates it can multiply but mostly does not. With the defaults
    29 % of the teacher's answers are right; a teacher that always slips, as a perfect imitator does when decoded
    greedily, has 20 %. By the last digit alone (`strict` off) that would be 37 % and 26 %: a wrong chain ends
    right about one time in ten, and such luck would be rewarded like skill.
    """

    operations: int = 6
    modulus: int = 10
    slip: float = 0.7
    """How often the teacher does `*` as `+`."""
    levels: tuple[int, int] | None = None
    """Fewest and most signs beside `+` in a problem, all numbers between equally likely; none: 0 to two thirds."""
    shares: tuple[int, ...] = ()
    """How often training draws each level, from the lowest to the highest, such as 40,1,1; tests draw all alike."""
    signs: str = "*"
    """Signs beside `+`: `*`, `-` or both. A problem has one of them, each a skill of its own, and its kind by it."""
    slips: tuple[float, ...] = ()
    """How often the teacher does each of the signs as `+`; none means `slip` for all."""
    strict: bool = True
    """Success means that every step is right; otherwise that the last digit is."""
    judge_noise: float = 0.0
    """How often the judge of single steps says the opposite of what is so."""
    sharpness: float = 12.0
    """An annotator prefers a to b with probability σ(sharpness · difference of worth)."""
    noise: float = 0.0
    """How often an annotator says the opposite of what was meant."""
    layers: int = 2
    """Blocks of the model that it starts from, or that is made `fresh` for it."""

    bounds: ClassVar[Mapping[str, str]] = {
        "operations": "from 1 to 1000",
        "modulus": "from 2 to 10",
        "slip": "from 0 to 1",
        "slips": "from 0 to 1",
        "levels": "from 0 to 1000",
        "shares": "from 0 to 1000000",
        "judge_noise": "from 0 to 1",
        **StepAnnotators.annotator_bounds,
        "layers": "from 1 to 100",
    }

    presets: ClassVar[Mapping[str, Preset]] = {
        "frontier": Preset(
            {**HARD, "levels": (0, 8)},
            "skills that build on one another: curricula, sampling by difficulty",
            0.105,
        ),
        "skew": Preset(
            {**HARD, "levels": (0, 8), "shares": (40, 1, 1, 1, 1, 1, 1, 1, 1)},
            "few prompts teach anything: choosing prompts, memory of tasks",
            0.105,
            baseline="grpo:update.lr=1e-3",
        ),
        "cliff": Preset(
            {**HARD, "levels": (3, 5)},
            "success is rare, then takes off: exploration, sparse rewards",
            0.0,
            budget="steps=80",
        ),
        "wall": Preset(
            {**HARD, "levels": (6, 8)},
            "groups never differ, so that no gradient is left: hints, teachers, partial credit",
            0.0,
        ),
        "deep": Preset(
            {**HARD, "levels": (0, 8), "layers": DEEP},
            "a model of four layers, which has an inside: what is read off a layer, or learned there",
            0.09,
        ),
        "kinds": Preset(
            {"operations": 4, "levels": (0, 2), "signs": "*-", "slips": (0.7, 1.0)},
            "three skills apart, right always, sometimes and never: teachers for what never succeeds",
            0.43,
        ),
    }

    access: ClassVar[frozenset[str]] = frozenset(
        {
            "verify",
            "reference",
            "teacher",
            "pairs",
            "hint",
            "judge",
            "knowledge",
            "plan",
            "prefer",
            "preference",
        }
    )
    step_tokens: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.signs not in ("*", "-", "*-"):
            raise PanoplyError(f"chain.signs is *, - or *-, not '{plain(self.signs)}'.")
        if self.slips and len(self.slips) != len(self.signs):
            raise PanoplyError(
                f"chain.slips has a number for each of the signs {' and '.join(self.signs)}, not {len(self.slips)}."
            )
        low, high = self._levels
        if self.shares and (len(self.shares) != high - low + 1 or sum(self.shares) < 1):
            raise PanoplyError(
                f"chain.shares has a number for each of the levels {low} to {high}, not all 0, unlike "
                f"{', '.join(map(str, self.shares))}."
            )
        if not 0 <= low <= high <= self.operations:
            raise PanoplyError(
                f"chain.levels is a range within 0 to {self.operations}, the operations, not {low} to {high}."
            )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.of_characters(self._alphabet, specials=(END,))

    @property
    def start(self) -> str:
        """Long problems with a teacher who nearly always slips, and other signs, have models of their own."""
        hard = {name: getattr(self, name) for name in HARD} == HARD
        if self.layers != type(self).layers:
            named = "chain-deep-start" if self.layers == DEEP and hard and self.signs == "*" else ""
            return named or f"chain-start-of-{self.layers}-layers"
        if self.signs != "*":
            return "chain-kinds-start"
        return "chain-hard-start" if hard else "chain-start"

    def default_model(self) -> dict[str, Any]:
        return {**super().default_model(), "layers": self.layers}

    @property
    def keys(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"domain"} if len(self.signs) > 1 else ())

    def part_of(self, task: Task) -> str:
        """Where there are several signs: `sums`, `products` or `differences`."""
        if len(self.signs) == 1:
            return ""
        return next((KINDS[sign] for sign in self.signs if sign in task.data["problem"]), KINDS["+"])

    @property
    def max_tokens(self) -> int:
        return self.step_tokens * self.operations + 1

    def task(self, split: str, index: int) -> Task:
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        for attempt in range(1000):
            problem = self._problem(
                f"chain/{split}/{index}/{attempt}", self.shares if split == "train" else ()
            )
            id = stable_hash("chain", self.modulus, problem)
            if (id % HELD_OUT == 0) == (split == "test"):
                level = self.operations - problem.count("+")
                return Task(id, tuple(self._tokens(problem)), level, {"problem": problem})
        raise PanoplyError(f"chain has too few problems for a {split} split: ask for more operations.")

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Beside `success`: `ended`; `final`, it ends on the right digit; `steps`, the share of right steps.

        A step is judged by what was written before it, so one error does not spoil the steps after it.
        """
        problem = task.data["problem"]
        text = self._text([*task.given, *answer])
        trace = self._trace(problem)
        ended = text.endswith(END) and text.count(END) == 1
        final = ended and text[-2:-1] == trace[-1]
        return {
            "success": float(text == trace + END if self.strict else final),
            "final": float(final),
            "steps": sum(self._judge(problem, text)) / self.operations,
            "ended": float(ended),
        }

    def spans(self, task: Task, answer: Sequence[int]) -> list[tuple[int, int]]:
        """Three tokens each; the end of the answer is no step."""
        said = len(answer) - (self._text(answer[-1:]) == END)
        return [(at, min(at + self.step_tokens, said)) for at in range(0, said, self.step_tokens)]

    def judge(self, task: Task, answer: Sequence[int], rng: np.random.Generator) -> list[bool]:
        """A step is judged by what was written before it, and wrong where the problem has no more steps."""
        text = self._text([*task.given, *answer])
        right = [*self._judge(task.data["problem"], text)][len(task.given) // self.step_tokens :]
        spans = self.spans(task, answer)
        verdicts = [at < len(right) and right[at] for at in range(len(spans))]
        flips = rng.random(len(spans)) < self.judge_noise
        return [bool(verdict != flip) for verdict, flip in zip(verdicts, flips, strict=True)]

    def aid(self, task: Task, kind: str) -> list[list[int]]:
        """Of `3+4*2=` the knowledge is `7*2=4`, what signs beside `+` give, smallest first; the plan is `+4`, `*2`."""
        problem = task.data["problem"]
        if kind == "plan":
            return [self._tokens(sign + operand) for sign, operand in _steps(problem)]
        if kind != "knowledge":
            return super().aid(task, kind)
        results = [problem[0], *self._trace(problem)[self.step_tokens - 1 :: self.step_tokens]]
        facts = {
            f"{before}{sign}{operand}={after}"
            for before, after, (sign, operand) in zip(results, results[1:], _steps(problem), strict=False)
            if sign != "+"
        }
        return [self._tokens(fact) for fact in sorted(facts)]

    def gold(self, task: Task) -> list[int]:
        return self._answer(task, self._trace(task.data["problem"]))

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        rates = dict(zip(self.signs, self.slips or repeat(self.slip), strict=False))
        often = [rates.get(operation, 0.0) for operation, _ in _steps(task.data["problem"])]
        slips = (rng.random(self.operations) < often).tolist()
        hinted = len(task.given) // self.step_tokens
        return self._answer(task, self._trace(task.data["problem"], [False] * hinted + slips[hinted:]))

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also the answers with one result changed: the last, or where every step counts, any."""
        trace, size = self._trace(task.data["problem"]), self.step_tokens
        results = range(size - 1, len(trace), size) if self.strict else [len(trace) - 1]
        changed = (trace[:at] + self._digit(int(trace[at]) + 1) + trace[at + 1 :] for at in results)
        return [*super().mistakes(task), *(self._answer(task, text) for text in changed)]

    @measures("hardest")
    def hardest(self, policy: Any, seed: int) -> float:
        """Success of sampled answers on the hardest third of the levels alone: of 0 to 8, on those from 6 on."""
        from panoply.evaluation.held_out import evaluate

        low, high = self._levels
        hard = replace(self, levels=(high - (high - low) // 3, high), shares=())
        return evaluate(hard, policy, HARDEST, seed=seed, greedy=False).sampled

    @property
    def _levels(self) -> tuple[int, int]:
        return self.levels or (0, max(1, 2 * self.operations // 3))

    def _problem(self, key: str, shares: Sequence[int]) -> str:
        """The problem that a key stands for: a level, so often one of the signs on random places, random digits."""
        draw = int.from_bytes(shake_256(key.encode()).digest(16 + 2 * self.operations), "big")
        low, high = self._levels
        if shares:
            draw, at = divmod(draw, sum(shares))
            more = next(i for i, most in enumerate(accumulate(shares)) if at < most)
        else:
            draw, more = divmod(draw, high - low + 1)
        draw, sign = divmod(draw, len(self.signs))
        draw, first = divmod(draw, self.modulus)
        products, text = low + more, DIGITS[first]
        for places in range(self.operations, 0, -1):
            draw, place = divmod(draw, places)
            draw, operand = divmod(draw, self.modulus)
            text += (self.signs[sign] if place < products else "+") + DIGITS[operand]
            products -= place < products
        return text + "="

    def _trace(self, problem: str, slips: Sequence[bool] | None = None) -> str:
        """The steps of an answer. A slip does another sign as `+`, and the next step goes on from there."""
        value, text = problem[0], ""
        for (operation, operand), slip in zip(_steps(problem), slips or repeat(False), strict=False):
            value = self._apply(value, "+" if slip else operation, operand)
            text += operation + operand + value
        return text

    def _judge(self, problem: str, text: str) -> Iterator[bool]:
        """Whether each step is the problem's and follows from the result written before it."""
        value = problem[0]
        for at, (operation, operand) in enumerate(_steps(problem)):
            step = text[self.step_tokens * at : self.step_tokens * (at + 1)]
            yield value.isdigit() and step == operation + operand + self._apply(value, operation, operand)
            value = step[-1:]

    def _apply(self, value: str, operation: str, operand: str) -> str:
        a, b = int(value), int(operand)
        return self._digit({"*": a * b, "-": a - b}.get(operation, a + b))

    def _digit(self, number: int) -> str:
        return DIGITS[number % self.modulus]

    def _answer(self, task: Task, trace: str) -> list[int]:
        """The tokens of a whole trace that are not in the prompt yet."""
        return self._tokens(trace[len(task.given) :] + END)

    def _tokens(self, text: str) -> list[int]:
        return [self._ids[character] for character in text]

    def _text(self, tokens: Sequence[int]) -> str:
        """One character a token, so that nothing a policy may write is skipped; foreign tokens become `?`."""
        return "".join(self._characters.get(token, "?") for token in tokens)

    @property
    def _alphabet(self) -> str:
        return f"{DIGITS}+{self.signs}="

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {character: self.tokenizer.id(character) for character in self._alphabet + END}

    @cached_property
    def _characters(self) -> dict[int, str]:
        return {token: character for character, token in self._ids.items()}


def _steps(problem: str) -> Iterator[tuple[str, str]]:
    """`3+4*2=` → `+4`, `*2`."""
    return zip(problem[1:-1:2], problem[2:-1:2], strict=True)
