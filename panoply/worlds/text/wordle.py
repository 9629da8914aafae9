"""A kind of `guess`: a hidden word of four letters, and marks that say which letters were right."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np

from panoply.worlds.text.characters import Draws
from panoply.worlds.text.riddles import ASK, NONE, Heard, Riddle, Said

LETTERS = "aelnorst"
LIST = """
also alto ante area arts earl earn ease east else lane last late lean lens less lone loot lore lose loss lost
near neat nest nose note oral real rent rest role roll root rose salt seal seat sent slot solo soon sort star
tale teal tell tone torn tree
"""
WORDS = tuple(LIST.split())
HERE, ELSEWHERE, UNKNOWN = "G", "Y", "?"
FIRST = ("neat", "lost", "rose", "tale", "oral", "sent")
"""Words that may be the first guess, which is given."""
PLAYERS = ("opener", "finisher", "opener", "finisher", "wanderer")


@cache
def marks(hidden: str, guess: str) -> str:
    """`G` a letter in its place, `Y` one that stands elsewhere, `_` one that is not, or not again, in the word."""
    left = Counter(h for h, g in zip(hidden, guess, strict=True) if h != g)
    found = ""
    for h, g in zip(hidden, guess, strict=True):
        elsewhere = h != g and left[g] > 0
        left[g] -= elsewhere
        found += HERE if h == g else ELSEWHERE if elsewhere else NONE
    return found


@cache
def best_of(left: tuple[str, ...]) -> str:
    """The word among those left whose marks tell most of them apart."""

    def expected(guess: str) -> float:
        sizes = Counter(marks(hidden, guess) for hidden in left).values()
        return float(sum(size * np.log(size) for size in sizes))

    return min(left, key=lambda guess: (expected(guess), guess))


class Wordle(Riddle):
    """`tale_Y_G>` is a first guess that is given, and its marks. Each turn is another word of four letters, and hears
    its marks, or `?` where it is none of the fifty words; the hidden one ends the episode, and so do four turns.

    ```
    tale_Y_G>roseG_Y_        hidden: rare, if it were a word here
    ```

    A secret is the hidden word and the first guess, one of six: half of the pairs are held out.
    """

    alphabet = LETTERS + HERE + ELSEWHERE + NONE + UNKNOWN + ASK
    cap, slip, longest, players, one_in = 4, 0.5, 4, len(PLAYERS), 2

    def secret(self, draws: Draws) -> str | None:
        hidden, first = WORDS[draws.below(len(WORDS))], FIRST[draws.below(len(FIRST))]
        return None if hidden == first else hidden + first

    def prompt(self, secret: str) -> str:
        hidden, first = secret[:4], secret[4:]
        return first + marks(hidden, first) + ASK

    def complete(self, turn: str) -> bool:
        return len(turn) == self.longest

    def hear(self, secret: str, said: Said, turn: str) -> Heard:
        """`score` is −1 for a word that is not the hidden one, whether it is a word or not."""
        right, known = turn == secret[:4], turn in WORDS
        reply = marks(secret[:4], turn) if known else UNKNOWN
        signals = {"success": float(right), "score": float(right) - 1, "invalid": float(not known)}
        return Heard(reply, signals, done=right)

    def left(self, secret: str, said: Said) -> tuple[str, ...]:
        """The words that agree with all marks."""
        heard = [(secret[4:], marks(secret[:4], secret[4:])), *((t, r) for t, r in said if r != UNKNOWN)]
        return tuple(word for word in WORDS if all(marks(word, guess) == reply for guess, reply in heard))

    def expert(self, secret: str, said: Said) -> str:
        return best_of(self.left(secret, said))

    def careless(self, secret: str, said: Said, rng: np.random.Generator, slip: float) -> str:
        """Any word of the list, or one that agrees with the marks."""
        return str(rng.choice(WORDS if rng.random() < slip else self.left(secret, said)))

    def written(self, secret: str, said: Said, number: int, rng: np.random.Generator) -> str:
        kind = PLAYERS[number % len(PLAYERS)]
        knows = {"opener": len(said) < 2, "finisher": len(said) >= 1, "wanderer": False}[kind]
        return self.expert(secret, said) if knows else str(rng.choice(WORDS))

    def wrong(self, secret: str) -> list[list[str]]:
        """The first guess again and again, and one turn too many."""
        return [[secret[4:]] * self.cap, [*[secret[4:]] * self.cap, secret[:4]]]
