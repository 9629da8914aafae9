"""The kind `wordle` of the world `guess`: a hidden word, and marks that say which letters of a guess were right."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product

import numpy as np

from panoply.seeds import stable_hash
from panoply.worlds.text.characters import Draws
from panoply.worlds.text.riddles import ASK, NONE, Heard, Riddle, Said

LETTERS, LENGTH, NUMBER = "abcdef", 3, 64
WORDS = tuple(
    sorted(
        sorted(map("".join, product(LETTERS, repeat=LENGTH)), key=lambda w: stable_hash("word", w))[:NUMBER]
    )
)
"""The words there are: 64 of the 216 that the letters make, the same everywhere."""
HERE, ELSEWHERE, UNKNOWN = "G", "Y", "?"
CARE = (2.0, 1.0, 0.5)
"""How much more often than the careless teacher each player of the log heeds the marks."""


@cache
def marks(hidden: str, guess: str) -> str:
    """`G` a letter in its place, `Y` one that stands elsewhere, `_` one that is not, or not again, in the word.

    A letter of the hidden word accounts for one mark: those in their places first, then the others from the left.
    So `aab` against a hidden `cad` is `_G_`, and against `dca` it is `Y__`.
    """
    left = Counter(h for h, g in zip(hidden, guess, strict=True) if h != g)
    found = ""
    for h, g in zip(hidden, guess, strict=True):
        elsewhere = h != g and left[g] > 0
        left[g] -= elsewhere
        found += HERE if h == g else ELSEWHERE if elsewhere else NONE
    return found


@cache
def best_of(left: tuple[str, ...]) -> str:
    """The word among those left whose marks leave the fewest on average; of equals the first."""

    def remaining(guess: str) -> int:
        return sum(size**2 for size in Counter(marks(hidden, guess) for hidden in left).values())

    return min(left, key=lambda guess: (remaining(guess), guess))


class Wordle(Riddle):
    """`cfa_Y_>` is a first guess, which is given, and its marks. Every turn is another word of three letters and hears
    its marks, or `?` where it is none of the 64 words; the hidden one ends the episode, and so do five turns.

    ```
    cfa_Y_>fdbGY_>fed        f begins the hidden word, which has a d in its third place: fed
    ```

    A secret is the hidden word and the first guess: 4,032 pairs.
    """

    alphabet = LETTERS + HERE + ELSEWHERE + NONE + UNKNOWN + ASK
    cap, slip, hard, longest, players = 5, 0.75, 0.98, LENGTH, len(CARE)

    def secret(self, draws: Draws) -> str | None:
        hidden, first = WORDS[draws.below(NUMBER)], WORDS[draws.below(NUMBER)]
        return None if hidden == first else hidden + first

    def prompt(self, secret: str) -> str:
        first = secret[LENGTH:]
        return first + marks(secret[:LENGTH], first) + ASK

    def complete(self, turn: str) -> bool:
        return len(turn) == LENGTH

    def hear(self, secret: str, said: Said, turn: str) -> Heard:
        """`score` is −1 for what is not the hidden word, whether it is a word or not."""
        hidden, known = secret[:LENGTH], turn in WORDS
        right = turn == hidden
        signals = {
            "success": float(right),
            "score": float(right) - 1,
            "wasted": float(known and turn not in self.left(secret, said)),
            "invalid": float(not known),
        }
        return Heard((marks(hidden, turn) if known else UNKNOWN) + ASK, signals, done=right)

    def left(self, secret: str, said: Said) -> tuple[str, ...]:
        """The words that agree with all marks."""
        hidden, first = secret[:LENGTH], secret[LENGTH:]
        return agreeing(hidden, frozenset({first, *(turn for turn, _ in said if turn in WORDS)}))

    def expert(self, secret: str, said: Said) -> str:
        return best_of(self.left(secret, said))

    def careless(self, secret: str, said: Said, rng: np.random.Generator, slip: float) -> str:
        """Says the last word again, which tells nothing."""
        last = said[-1][0] if said else secret[LENGTH:]
        return last if rng.random() < slip else self.expert(secret, said)

    def written(self, secret: str, said: Said, number: int, rng: np.random.Generator, slip: float) -> str:
        """Players heed the marks twice as often as the careless teacher, as often, or half as often."""
        care = min(1.0, (1 - slip) * CARE[number % len(CARE)])
        return self.careless(secret, said, rng, 1 - care)

    def wrong(self, secret: str) -> list[list[str]]:
        """The first guess again and again, and one turn too many."""
        again = [secret[LENGTH:]] * self.cap
        return [again, [*again, secret[:LENGTH]]]


@cache
def agreeing(hidden: str, guesses: frozenset[str]) -> tuple[str, ...]:
    """The words to which all guesses would have had the marks that they have to the hidden one."""
    return tuple(word for word in WORDS if all(marks(word, g) == marks(hidden, g) for g in guesses))
