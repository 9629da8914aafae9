"""Programs of a stack machine that are to leave a number; graded by how they fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from panoply.worlds.text.characters import DIGITS, Draws
from panoply.worlds.text.program_kind import Kind

WORDS = DIGITS + "+*ds"
RIGHT, WRONG, BROKEN, ENDLESS = 1.0, -0.3, -0.6, -1.0
"""What a program scores that passes, leaves something else, finds too few numbers on the stack, or has no one end."""


class Stack(Kind):
    """`4071=` asks for a program that leaves 4071, and nothing else, on the stack: `25*dd4*0+*7+*1+$`.

    A digit puts itself on the stack; `+` and `*` take two numbers and leave one; `d` doubles the topmost, `s` exchanges
    two. The expert makes ten (`25*`), three of it (`dd`), and goes from digit to digit: ((4·10 + 0)·10 + 7)·10 + 1. The
    careless teacher doubles once too few, so that the last `*` finds one number; a quarter as often it takes one `+`
    for a `*` or the other way round, in the `hard` setting any of them.
    """

    alphabet: ClassVar[str] = WORDS + "="
    longest: ClassVar[int] = 16
    asks: ClassVar[str] = "="
    slip: ClassVar[float] = 0.6
    hard_slip: ClassVar[float] = 0.93

    def problem(self, draws: Draws) -> str:
        return f"{draws.below(10_000):04d}="

    def solution(self, problem: str) -> str:
        return f"25*dd{problem[0]}" + "".join(f"*{digit}+" for digit in problem[1:-1])

    def careless(self, problem: str, slip: float, hard: bool, rng: np.random.Generator) -> str:
        words = list(self.solution(problem))
        signs = [at for at, word in enumerate(words) if word in "+*"]
        for at in signs if hard else [signs[int(rng.integers(len(signs)))]]:
            if rng.random() < slip / 4:
                words[at] = "+" if words[at] == "*" else "*"
        return "".join(words).replace("dd", "d") if rng.random() < slip else "".join(words)

    def grade(self, problems: Sequence[str], programs: Sequence[str | None]) -> list[dict[str, float]]:
        """Beside `success`: `score`, which tells failures apart."""
        found = []
        for problem, program in zip(problems, programs, strict=True):
            left = None if program is None else run(program)
            right = left == [int(problem[:-1])]
            how = RIGHT if right else ENDLESS if program is None else BROKEN if left is None else WRONG
            found.append({"success": float(right), "score": how})
        return found

    def verdict(self, problem: str, program: str) -> str:
        left = run(program)
        return (
            "a word finds too few numbers"
            if left is None
            else f"leaves {' '.join(map(str, left)) or 'nothing'}"
        )

    def wrong(self, problem: str) -> list[str]:
        """One `d` too few, two numbers left over, one more than was asked for."""
        right = self.solution(problem)
        return [right.replace("dd", "d"), "1" + right, right + "1+"]


def run(program: str) -> list[int] | None:
    """What is on the stack after a program; None where a word finds too few numbers, or is none."""
    stack: list[int] = []
    for word in program:
        if word in DIGITS:
            stack.append(int(word))
        elif word not in WORDS or len(stack) < (1 if word == "d" else 2):
            return None
        elif word == "d":
            stack.append(stack[-1])
        else:
            above, below = stack.pop(), stack.pop()
            stack += {"s": [above, below], "+": [below + above], "*": [below * above]}[word]
    return stack
