"""The tools of the world `tools`, in characters: what is asked, what a call gives, and how a teacher uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from panoply.seeds import stable_hash
from panoply.worlds.text.characters import DIGITS, Draws

CALL, ANSWER, NONE, ASK = "C", "A", "_", ">"
Calls = list[tuple[str, str]]
"""What was asked and what came back, of the calls that had a result."""


class Tool(ABC):
    """One kind of `tools`. A kind of its own file is entered in `TOOLS` (tools.py)."""

    alphabet: ClassVar[str]
    cap: ClassVar[int]
    easy: ClassVar[float]
    slip: ClassVar[float]
    most_calls: ClassVar[int]
    lengths: ClassVar[dict[str, int]]
    """Tokens of a turn by its first, at most where a call has an end."""
    ends: ClassVar[str] = ""
    """What a call ends with, where calls are of any length."""
    answers: ClassVar[Sequence[str]]
    """All that can be answered."""

    @classmethod
    def of(cls, options: Any) -> Tool:
        """The tool with a world's options; these have none of their own."""
        return cls()

    @abstractmethod
    def question(self, draws: Draws, *, easy: bool) -> str:
        """A question as text, with all that its answer depends on."""

    @abstractmethod
    def needed(self, question: str) -> int:
        """How many calls it takes."""

    @abstractmethod
    def answer(self, question: str) -> str: ...

    @abstractmethod
    def call(self, question: str, asked: str) -> str | None:
        """What a call gives; None if it has no grammar."""

    def prepare(self, turns: Iterable[str]) -> None:  # noqa: B027 -- most need not know
        """Told of turns that are about to be taken together, by tools that had rather work on many at a time."""

    def verdict(self, turn: str) -> str:
        """What came of a call, in words for those who look at it; empty where nothing was run."""
        return ""

    def result(self, question: str, verb: str, asked: str, calls: Calls) -> str | None:
        """What a turn gives that is no answer; None if it has no grammar. For kinds with more verbs than `C`."""
        return self.call(question, asked) if verb == CALL else None

    @abstractmethod
    def chain(self, question: str) -> list[str]:
        """The calls that lead to the answer."""

    @abstractmethod
    def observe(self, question: str, calls: Calls) -> str: ...

    @abstractmethod
    def careful(self, question: str, calls: Calls) -> str:
        """The turn that leads on, or the answer."""

    @abstractmethod
    def hasty(self, question: str, calls: Calls, rng: np.random.Generator) -> str | None:
        """The answer of one who cannot wait; None where the time has come to answer."""

    def careless(
        self, question: str, calls: Calls, rng: np.random.Generator, slip: float, needless: float
    ) -> str:
        slips, extra = (rng.random(2) < (slip, needless)).tolist()
        hasty = self.hasty(question, calls, rng) if slips else None
        if hasty is not None:
            return hasty
        return (
            self.first_call(question)
            if extra and self._needless(question, calls)
            else self.careful(question, calls)
        )

    @abstractmethod
    def first_call(self, question: str) -> str: ...

    def _needless(self, question: str, calls: Calls) -> bool:
        return not calls and self.needed(question) == 0


ENTITIES, RELATIONS, FACT = "abcdefghijklmnop", "uvwxyz", "F"


class Lookup(Tool):
    """A question is `e r1 r2 r3`, a mark whether the fact is given, and the number of the knowledge base."""

    alphabet = ENTITIES + RELATIONS + CALL + ANSWER + FACT + NONE + ASK
    cap, easy, slip, most_calls = 6, 0.5, 0.6, 3
    lengths: ClassVar[dict[str, int]] = {CALL: 3, ANSWER: 2}
    answers = ENTITIES

    def question(self, draws: Draws, *, easy: bool) -> str:
        hops = 1 if easy else (1, 2, 2, 3, 3)[draws.below(5)]
        entity, left, path = ENTITIES[draws.below(len(ENTITIES))], list(RELATIONS), ""
        for _ in range(hops):
            path += left.pop(draws.below(len(left)))
        return f"{entity}{path.ljust(3, NONE)}{FACT if easy else NONE}{draws.below(1 << 40)}"

    def needed(self, question: str) -> int:
        return 0 if question[4] == FACT else len(self._path(question))

    def answer(self, question: str) -> str:
        entity = question[0]
        for relation in self._path(question):
            entity = known(question[5:], entity, relation)
        return entity

    def chain(self, question: str) -> list[str]:
        entity, found = question[0], []
        for relation in self._path(question) if self.needed(question) else "":
            found.append(entity + relation)
            entity = known(question[5:], entity, relation)
        return found

    def call(self, question: str, asked: str) -> str | None:
        if len(asked) != 2 or asked[0] not in ENTITIES or asked[1] not in RELATIONS:
            return None
        return known(question[5:], asked[0], asked[1])

    def observe(self, question: str, calls: Calls) -> str:
        asked, found = calls[-1] if calls else (2 * NONE, NONE)
        fact = question[:2] + self.answer(question) if question[4] == FACT else 3 * NONE
        return f"{question[:4]}{FACT}{fact}{asked}{found}{ASK}"

    def careful(self, question: str, calls: Calls) -> str:
        path = self._path(question)
        if question[4] == FACT:
            return ANSWER + self.answer(question)
        entity = question[0]
        for relation in path:
            if calls and calls[-1][0] == entity + relation:
                rest = path[path.index(relation) + 1 :]
                return f"{CALL}{calls[-1][1]}{rest[0]}" if rest else ANSWER + calls[-1][1]
            entity = known(question[5:], entity, relation)
        return self.first_call(question)

    def hasty(self, question: str, calls: Calls, rng: np.random.Generator) -> str | None:
        """With the entity in hand: the last one found, or at first the one that is asked about."""
        return ANSWER + (calls[-1][1] if calls else question[0])

    def first_call(self, question: str) -> str:
        return CALL + question[:2]

    def _path(self, question: str) -> str:
        return question[1:4].rstrip(NONE)


@lru_cache(maxsize=1 << 14)
def known(base: str, entity: str, relation: str) -> str:
    """A fact of a knowledge base."""
    return ENTITIES[stable_hash(base, entity, relation) % len(ENTITIES)]


SIGNS = "+-*"


class Calculator(Tool):
    """A question is `xxoyyozz`."""

    alphabet = DIGITS + SIGNS + CALL + ANSWER + NONE + ASK
    cap, easy, slip, most_calls = 5, 0.2, 0.55, 2
    lengths: ClassVar[dict[str, int]] = {CALL: 6, ANSWER: 3}
    answers = tuple(f"{number:02}" for number in range(100))

    def question(self, draws: Draws, *, easy: bool) -> str:
        numbers = [f"{draws.below(10 if easy else 100):02}" for _ in range(3)]
        signs = ["+" if easy else SIGNS[draws.below(3)] for _ in range(2)]
        return f"{numbers[0]}{signs[0]}{numbers[1]}{signs[1]}{numbers[2]}"

    def needed(self, question: str) -> int:
        """None for sums of single digits."""
        easy = all(question[i] == "0" for i in (0, 3, 6)) and question[2] == question[5] == "+"
        return 0 if easy else 2

    def answer(self, question: str) -> str:
        first = self._work(question[:5])
        return self._work(first + question[5:])

    def chain(self, question: str) -> list[str]:
        needs = self.needed(question)
        return [question[:5], self._work(question[:5]) + question[5:]] if needs else []

    def call(self, question: str, asked: str) -> str | None:
        good = len(asked) == 5 and asked[2] in SIGNS and (asked[:2] + asked[3:]).isdecimal()
        return self._work(asked) if good else None

    def observe(self, question: str, calls: Calls) -> str:
        found = calls[-1][1] if calls else 2 * NONE
        return f"{question}{found}{DIGITS[min(len(calls), 9)]}{ASK}"

    def careful(self, question: str, calls: Calls) -> str:
        if self.needed(question) == 0:
            return ANSWER + self.answer(question)
        first = self._work(question[:5])
        asked = calls[-1][0] if calls else ""
        if asked == first + question[5:]:
            return ANSWER + calls[-1][1]
        return CALL + first + question[5:] if asked == question[:5] else self.first_call(question)

    def hasty(self, question: str, calls: Calls, rng: np.random.Generator) -> str | None:
        """At random, before the second call."""
        return None if len(calls) >= 2 else f"{ANSWER}{rng.integers(100):02}"

    def first_call(self, question: str) -> str:
        return CALL + question[:5]

    def _work(self, sum_: str) -> str:
        a, b = int(sum_[:2]), int(sum_[3:5])
        number = {"+": a + b, "-": a - b, "*": a * b}[sum_[2]]
        return f"{number % 100:02}"
