"""Scripted writers by number: policies over strings that differ in skill and in style, and whose formats overlap."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from panoply.seeds import numpy_rng

LETTERS = "abcdef"
FAVOURED = (2, 2, 1, 1, 1, 1)
"""How often a writer uses two letters, and how often the others."""


@dataclass(frozen=True)
class Habits:
    """How often a writer does what.

    exact, alternates, avoids   has the length right, alternates vowels and consonants, avoids the forbidden letter
    brackets, pair              writes brackets, and then a pair of them rather than a stray one
    stray                       puts a z somewhere
    letters                     what is drawn from: a letter stands in it as often as it is favoured
    """

    exact: float = 0.4
    alternates: float = 0.4
    avoids: float = 0.5
    brackets: float = 0.6
    pair: float = 0.5
    stray: float = 0.03
    letters: str = LETTERS


CARELESS = Habits()
"""The world's teacher."""


@lru_cache(maxsize=4096)
def writer(number: int) -> Habits:
    """A writer by number, any whole one.

    A skill z ~ N(0, 1) moves all habits that answers are worth something for: each is 0.05 + 0.9·σ(3·(z + z′)) with a
    z′ ~ N(0, 1) of its own. So nobody is sure to do anything, and who does it cannot be told by one mark. The style is
    which two letters are written twice as often as others; it is worth nothing, unless one of them is forbidden.
    """
    rng = numpy_rng("writer", number)
    skill, own = rng.normal(), rng.normal(size=5)
    often = (0.05 + 0.9 / (1 + np.exp(-3 * (skill + own)))).tolist()
    exact, alternates, avoids, brackets, pair = often
    favour = rng.permutation(FAVOURED).tolist()
    letters = "".join(c * n for c, n in zip(LETTERS, favour, strict=True))
    return Habits(exact, alternates, avoids, brackets, pair, letters=letters)
