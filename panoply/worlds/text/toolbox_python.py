"""The tool `python` of the world `tools`: an interpreter in a sandbox, whose output, or error, is what a call gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from panoply.sandbox import Limits, Program, Result, Wanted
from panoply.worlds.text.characters import DIGITS
from panoply.worlds.text.toolbox import ANSWER, ASK, CALL, NONE, Calculator, Calls

STOP = ";"
"""Ends a call, and is no part of its code."""
WIDE = 4
"""Characters that are shown of what a program printed."""
FAULTS = {"SyntaxError": "S", "ZeroDivisionError": "Z", "TypeError": "T"}
OTHER, LATE, FAULT = "X", "L", "!"
"""An error that has no letter of its own, a program that was ended, and what stands before either."""
LIMITS = Limits(seconds=0.5, memory=64 * 2**20, output=4096)
LONGEST = 18
"""Characters of code."""
KEPT = 1 << 15
"""Programs whose output is remembered: the same ones come again and again, and print the same."""


@dataclass(frozen=True)
class Interpreter(Calculator):
    """A question is `xxoyyozz`, from left to right and modulo 100. `C((37+58)*64)%100;` has Python print the answer.

    Python multiplies before it adds, so that brackets matter; one too few is an error, which is shown as `__!S`.
    """

    sandbox: str = "auto"

    alphabet = (
        DIGITS
        + "+-*()%"
        + STOP
        + CALL
        + ANSWER
        + NONE
        + ASK
        + FAULT
        + "".join(FAULTS.values())
        + OTHER
        + LATE
    )
    cap, easy, slip, most_calls = 4, 0.5, 0.85, 1
    lengths: ClassVar[dict[str, int]] = {CALL: LONGEST + 2, ANSWER: 3}
    ends: ClassVar[str] = STOP

    @classmethod
    def of(cls, options: Any) -> Interpreter:
        return cls(options.sandbox)

    def needed(self, question: str) -> int:
        return min(1, super().needed(question))

    def chain(self, question: str) -> list[str]:
        return [self.code(question)] if self.needed(question) else []

    @staticmethod
    def code(question: str) -> str:
        """The call that gives the answer. A number of Python's has no zero before it."""
        a, b, c = (str(int(question[at : at + 2])) for at in (0, 3, 6))
        return f"(({a}{question[2]}{b}){question[5]}{c})%100{STOP}"

    def call(self, question: str, asked: str) -> str | None:
        if not asked.endswith(STOP) or STOP in asked[:-1]:
            return None
        self.prepare([CALL + asked])
        return shown(_remembered(self.sandbox)[asked[:-1]])

    def prepare(self, turns: Iterable[str]) -> None:
        """Run all programs of some turns at once, but for those that were run before."""
        known = _remembered(self.sandbox)
        codes = {t[1:-1] for t in turns if t.startswith(CALL) and t.endswith(STOP) and STOP not in t[1:-1]}
        if new := sorted(codes - known.keys()):
            results = (
                Wanted(self.sandbox).find().run_many([Program(f"print({c})", limits=LIMITS) for c in new])
            )
            if len(known) > KEPT:
                known.clear()
            known |= dict(zip(new, results, strict=True))

    def verdict(self, turn: str) -> str:
        if not turn.startswith(CALL) or not turn.endswith(STOP):
            return ""
        self.prepare([turn])
        result = _remembered(self.sandbox)[turn[1:-1]]
        lines = [line for line in result.said.splitlines() if line.strip()]
        return f"printed {' '.join(lines)}" if result.ok else result.ended or (lines or ["it failed"])[-1]

    def observe(self, question: str, calls: Calls) -> str:
        found = calls[-1][1] if calls else NONE * WIDE
        return f"{question}{found:{NONE}>{WIDE}}{DIGITS[min(len(calls), 9)]}{ASK}"

    def careful(self, question: str, calls: Calls) -> str:
        if self.needed(question) == 0:
            return ANSWER + self.answer(question)
        asked, found = calls[-1] if calls else ("", "")
        number = found.strip(NONE)
        ready = asked == self.code(question) and number.isdecimal()
        return f"{ANSWER}{int(number) % 100:02}" if ready else self.first_call(question)

    def hasty(self, question: str, calls: Calls, rng: np.random.Generator) -> str | None:
        """Before there is a result: an answer at random, or a bracket is forgotten, which Python minds.

        Not at sums of single digits, which it knows: who imitates it can add some, without Python too.
        """
        if not self.needed(question) or (calls and not calls[-1][1].strip(NONE).startswith(FAULT)):
            return None
        if rng.random() < 0.5:
            return CALL + self.code(question).replace("((", "(")
        return f"{ANSWER}{rng.integers(100):02}"

    def first_call(self, question: str) -> str:
        return CALL + self.code(question)


def shown(result: Result) -> str:
    """What is seen of what a program came to: the first characters it printed, or its error as a letter."""
    if result.ok:
        text = "".join(result.said.split())[:WIDE]
        return (text if set(text) <= set(Interpreter.alphabet) else FAULT + OTHER).rjust(WIDE, NONE)
    letter = LATE if result.ended else next((x for name, x in FAULTS.items() if name in result.said), OTHER)
    return f"{FAULT}{letter}".rjust(WIDE, NONE)


@lru_cache(maxsize=8)
def _remembered(sandbox: str) -> dict[str, Result]:
    """What became of programs in a sandbox, in this process."""
    return {}
