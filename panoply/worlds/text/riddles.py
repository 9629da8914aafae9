"""What the kinds of the world `guess` share, and the first of them: items that are told apart by yes and no."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import numpy as np

from panoply.seeds import stable_hash
from panoply.worlds.text.characters import Draws

Said = Sequence[tuple[str, str]]
"""The turns so far, each with what was heard after it."""
ASK, NONE = ">", "_"


@dataclass(frozen=True)
class Heard:
    """What comes back after a turn."""

    reply: str
    signals: Mapping[str, float]
    done: bool = False


class Riddle(ABC):
    """A kind of `guess`: what is hidden, what is said of it, and how a turn is answered. All of it is text."""

    alphabet: ClassVar[str]
    cap: ClassVar[int]
    """Turns in an episode."""
    slip: ClassVar[float]
    """How often the careless teacher errs."""
    hard: ClassVar[float | None] = None
    """How often where its pupil is to succeed hardly ever; None where even who errs always succeeds now and then."""
    longest: ClassVar[int]
    """Tokens of the longest turn."""
    players: ClassVar[int] = 0
    """Scripted players, who leave a log; 0 where there is none."""

    @abstractmethod
    def secret(self, draws: Draws) -> str | None:
        """A problem, with all that an episode depends on; None for a draw that is none."""

    @abstractmethod
    def prompt(self, secret: str) -> str: ...

    @abstractmethod
    def complete(self, turn: str) -> bool:
        """Whether a turn needs no more tokens."""

    @abstractmethod
    def hear(self, secret: str, said: Said, turn: str) -> Heard: ...

    @abstractmethod
    def expert(self, secret: str, said: Said) -> str: ...

    @abstractmethod
    def careless(self, secret: str, said: Said, rng: np.random.Generator, slip: float) -> str: ...

    def written(self, secret: str, said: Said, number: int, rng: np.random.Generator, slip: float) -> str:
        """What one of the players says."""
        raise NotImplementedError

    @abstractmethod
    def wrong(self, secret: str) -> list[list[str]]:
        """Episodes, turn by turn, that do not succeed."""


# ------------------------------------------------------------------ items

ITEMS, FACTS, YES, NO, QUESTION, GUESS = "abcdefghijklmnop", "01234567", "y", "N", "Q", "G"
SHOWN = 6
"""Candidates in a prompt."""


def _table() -> dict[str, tuple[bool, ...]]:
    """Which facts hold of each item; no two items are alike."""
    found: dict[str, tuple[bool, ...]] = {}
    for attempt in count():
        item = ITEMS[len(found)]
        facts = tuple(bool(stable_hash("item", item, fact, attempt) % 2) for fact in FACTS)
        if facts not in found.values():
            found[item] = facts
        if len(found) == len(ITEMS):
            return found
    raise AssertionError


TABLE = _table()


class Items(Riddle):
    """`bdfhkm>` names six candidates. `Q3` asks for the fourth fact and is answered with `y` or `N`; `Gk` guesses k,
    and ends the episode. A secret is the candidates and, at its end, which of them it is.

    ```
    bdfhkm>Q3yQ5NGk     k, after two questions
    ```
    """

    alphabet = ITEMS + FACTS + YES + NO + QUESTION + GUESS + NONE + ASK
    cap, slip, longest = 6, 0.5, 2

    def secret(self, draws: Draws) -> str | None:
        left, shown = list(ITEMS), ""
        for _ in range(SHOWN):
            shown += left.pop(draws.below(len(left)))
        return "".join(sorted(shown)) + shown[draws.below(SHOWN)]

    def prompt(self, secret: str) -> str:
        return secret[:-1] + ASK

    def complete(self, turn: str) -> bool:
        return len(turn) == 2 or turn not in (QUESTION, GUESS)

    def hear(self, secret: str, said: Said, turn: str) -> Heard:
        """`score` is −1 a question; a wrong guess, after which nothing can come, costs all turns that are left."""
        verb, what, hidden = turn[:1], turn[1:], secret[-1]
        asked = verb == QUESTION and len(what) == 1 and what in FACTS
        guessed = verb == GUESS and len(what) == 1 and what in ITEMS
        right = guessed and what == hidden
        left = self.left(secret, said)
        wasted = asked and len({TABLE[item][int(what)] for item in left}) == 1
        lost = float(self.cap - len(said)) if guessed else 1.0
        signals = {
            "success": float(right),
            "score": 0.0 if right else -lost,
            "wasted": float(wasted),
            "invalid": float(not asked and not guessed),
        }
        reply = (YES if TABLE[hidden][int(what)] else NO) if asked else NONE
        return Heard(reply, signals, done=guessed)

    def left(self, secret: str, said: Said) -> str:
        """The candidates that agree with every answer."""
        heard = [(int(turn[1]), reply == YES) for turn, reply in said if reply != NONE]
        return "".join(i for i in secret[:-1] if all(TABLE[i][fact] == yes for fact, yes in heard))

    def expert(self, secret: str, said: Said) -> str:
        """The question that comes nearest to halving what is left; of one alone it is sure."""
        left = self.left(secret, said)
        if len(left) == 1:
            return GUESS + left
        yes = [sum(TABLE[item][int(fact)] for item in left) for fact in FACTS]
        return QUESTION + min(FACTS, key=lambda fact: (abs(2 * yes[int(fact)] - len(left)), fact))

    def careless(self, secret: str, said: Said, rng: np.random.Generator, slip: float) -> str:
        """Guesses too soon, one of those that are left."""
        left = self.left(secret, said)
        return (
            GUESS + left[int(rng.integers(len(left)))] if rng.random() < slip else self.expert(secret, said)
        )

    def wrong(self, secret: str) -> list[list[str]]:
        """Another item, and a question too many."""
        other = next(item for item in secret[:-1] if item != secret[-1])
        return [[GUESS + other], [QUESTION + FACTS[0]] * self.cap + [GUESS + secret[-1]]]
