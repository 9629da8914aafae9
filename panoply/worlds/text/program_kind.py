"""What a kind of the world `program` brings: what is asked, what a program does, and how a teacher slips.

Problems and programs are text. A problem is all that a program is graded by; a policy sees its `prompt` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from panoply.sandbox import Wanted
from panoply.worlds.text.characters import Draws
from panoply.worlds.world import Signal


class Kind(ABC):
    alphabet: ClassVar[str]
    """One character a token, of prompts and programs."""
    longest: ClassVar[int]
    """The most tokens of a program, without its end."""
    asks: ClassVar[str] = ">"
    """What a problem ends with; it is nowhere else in it."""
    slip: ClassVar[float]
    """How often the teacher slips, where nothing else is said."""
    hard_slip: ClassVar[float]
    """The same in the `hard` setting, in which it slips in more ways than one."""
    access: ClassVar[frozenset[str]] = frozenset()
    """What a method may ask for beside what all kinds have: `teachers`, where there are `equivalents`."""

    walls: ClassVar[str] = ""
    """What keeps its programs in, where that is no sandbox."""

    @property
    def sandboxed(self) -> Wanted | None:
        """The sandbox that its programs run in; None where they need none."""
        return None

    def within(self, sandbox: str) -> Kind:
        """The same kind, with a sandbox of that name to run programs in."""
        return self

    @abstractmethod
    def problem(self, draws: Draws) -> str:
        """A problem, drawn at random."""

    def worth_asking(self, problem: str) -> bool:
        """Whether a problem that was drawn is one: others are drawn anew."""
        return True

    def prompt(self, problem: str) -> str:
        """What a policy gets to see of it."""
        return problem

    @abstractmethod
    def solution(self, problem: str) -> str:
        """The reference program."""

    @abstractmethod
    def careless(self, problem: str, slip: float, hard: bool, rng: np.random.Generator) -> str:
        """The program of a teacher who slips so often."""

    @abstractmethod
    def grade(
        self, problems: Sequence[str], programs: Sequence[str | None]
    ) -> Sequence[Mapping[str, Signal]]:
        """Signals of programs, all at once: `success` and the kind's own, the same names for each.

        None is an answer that has no end, or more than one. It cannot succeed. A signal may have a number for every
        token of a program, the end included.
        """

    @abstractmethod
    def verdict(self, problem: str, program: str) -> str:
        """What a program does, or why it does nothing, in a line for those who look at it."""

    def equivalents(self, problem: str) -> list[str]:
        """Right programs, the reference first."""
        return [self.solution(problem)]

    def broken(self, problem: str, n: int, rng: np.random.Generator) -> list[str] | None:
        """Up to so many right programs with one thing changed, which are wrong; None where a kind has none but its
        teacher's."""
        return None

    def wrong(self, problem: str) -> list[str]:
        """Programs that must not succeed."""
        return []

    def level(self, problem: str) -> int:
        """How hard it is."""
        return 0

    def part(self, problem: str) -> str:
        """The sort of problem, where there are several, whose success is reported apart."""
        return ""

    def allowed(self, problem: str, said: str) -> str | None:
        """The characters that may follow, the end `$` among them; None for all of them."""
        return None
