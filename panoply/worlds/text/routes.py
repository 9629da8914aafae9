"""Chains of sums and products that are answered at once, reasoned through, or handed to a tool, each at its price."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, ClassVar

import torch

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.worlds.measures import measures
from panoply.worlds.text.characters import DIGITS
from panoply.worlds.text.modes import Chains
from panoply.worlds.world import Task

INSTANT, REASONED, AGENTIC = "IRA"
ASKED = 256
"""Held-out problems of which the share of right answers is measured."""


@world("routes@1")
@dataclass(frozen=True)
class Routes(Chains):
    """`3+4*2=` is worked out from left to right, modulo 10, in a mode that the first letter of the answer names.

        I4$          instant: the result
        R+47*24$     reasoned: sign, operand and result of every step
        A3+4*2$      agentic: what is written is worked out by a tool

    A mode has a price, whether the answer is right or not. At once a small model does one step and guesses at more;
    reasoning it does all of them with practice; the tool never errs, and needs the problem copied. The careless teacher
    answers in any mode, however long the problem, and writes or does `*` as `+`.

    Signals: `success`, `cost`, `instant`, `agentic`, `malformed`, `ended`.
    """

    operations: tuple[int, int] = (1, 4)
    habit: tuple[float, ...] = (0.34, 0.33, 0.33)
    """How often the teacher answers in each of the modes I, R and A."""
    slips: tuple[float, ...] = (0.4, 0.6, 0.4)
    """How often it takes `*` for `+` in each of them."""
    costs: tuple[float, ...] = (1.0, 5.0, 20.0)
    """What an answer in each of them costs; one in none of them costs as much as the dearest."""

    bounds: ClassVar[Mapping[str, str]] = {**Chains.bounds, "costs": "at least 0"}
    alphabet: ClassVar[str] = DIGITS + "+*=" + INSTANT + REASONED + AGENTIC
    ways: ClassVar[tuple[str, ...]] = (INSTANT, REASONED, AGENTIC)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.costs) != len(self.ways):
            raise PanoplyError(
                f"routes.costs has a number for each of the modes {', '.join(self.ways)}, not {len(self.costs)}."
            )

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        body, mode = self.body([*task.given, *answer]), self.mode(task, answer)
        said = body or ""
        shaped = (
            bool(mode)
            and re.fullmatch(FORMS[mode], said) is not None
            and len(said) == self._length(task, mode)
        )
        right = (
            said == self._said(task, mode)
            if mode != AGENTIC
            else shaped and _value(said[1:]) == self._result(task)
        )
        return {
            "success": float(shaped and right),
            "cost": self.costs[self.ways.index(mode)] if mode else max(self.costs),
            "instant": float(mode == INSTANT),
            "agentic": float(mode == AGENTIC),
            "malformed": float(not shaped),
            "ended": float(body is not None),
        }

    @measures("per-right")
    def per_right(self, policy: Any, seed: int) -> float:
        """What a right answer costs: the price of the modes that a policy chooses, over its success, held out."""
        from panoply.evaluation.held_out import evaluate

        chances = torch.stack([self.begins(policy, way) for way in self.ways], -1)
        spent = chances @ torch.tensor(self.costs, dtype=torch.double) + (1 - chances.sum(-1)) * max(
            self.costs
        )
        right = evaluate(self, policy, ASKED, seed=seed, greedy=False).sampled
        return float(spent.mean()) / max(right, 1 / ASKED)

    def gold(self, task: Task) -> list[int]:
        """By the tool, or in the mode that is given."""
        mode = self.mode(task, ()) or AGENTIC
        return self.tokens(self._said(task, mode) + "$")[len(task.given) :]

    def mistakes(self, task: Task) -> list[list[int]]:
        """Also a right answer in no mode, a result that is wrong, and another problem for the tool."""
        wrong = DIGITS[(self._result(task) + 1) % 10]
        other = task.data["problem"][:-1] + DIGITS[(int(task.data["problem"][-1]) + 1) % 10]
        kept = [] if _value(other) == self._result(task) else [self.tokens(f"{AGENTIC}{other}$")]
        return [self.tokens(f"{self._result(task)}$"), self.tokens(f"{INSTANT}{wrong}$"), *kept]

    def _result(self, task: Task) -> int:
        return _value(task.data["problem"])

    def _length(self, task: Task, mode: str) -> int:
        """Characters of an answer in a mode, before its end."""
        return 1 + {INSTANT: 1, REASONED: 3 * task.level, AGENTIC: 1 + 2 * task.level}[mode]

    def _said(self, task: Task, mode: str, slips: Sequence[bool] | None = None) -> str:
        problem: str = task.data["problem"]
        value, steps, copied = int(problem[0]), "", problem[0]
        for sign, by, slip in zip(problem[1::2], problem[2::2], slips or repeat(False), strict=False):
            value = (value * int(by) if sign == "*" and not slip else value + int(by)) % 10
            steps += f"{sign}{by}{value}"
            copied += ("+" if slip else sign) + by
        return mode + {INSTANT: str(value), REASONED: steps, AGENTIC: copied}.get(mode, "")


FORMS = {
    INSTANT: rf"{INSTANT}\d",
    REASONED: rf"{REASONED}([+*]\d\d)+",
    AGENTIC: rf"{AGENTIC}\d([+*]\d)+",
}


def _value(problem: str) -> int:
    """What a chain comes to: the tool."""
    value = int(problem[0])
    for sign, by in zip(problem[1::2], problem[2::2], strict=True):
        value = (value * int(by) if sign == "*" else value + int(by)) % 10
    return value
