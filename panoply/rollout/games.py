"""Games of several seats: a row is one seat of one game, and an episode is what one seat does and earns in it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
LATER = ("after", "legal_after", "joint_after", "terminated", "truncated", "earned")
"""What is seen after a step, in contrast to what was seen and done in it."""


def folded(taken: dict[str, Array]) -> dict[str, Array]:
    """Decisions alone, each with all that its seat was paid until its next one.

    A seat is paid while it waits, too: for what it did, after the others have moved. So rows of waiting seats are
    written down like those of acting ones, and added here to the decision before them: rewards and signals are summed,
    and what came after a decision is what was seen in the end. What is paid before a seat's first decision goes to that
    one, so that returns are whole; a seat that never acts has no rows. Rows are in the order of episodes and of time.
    """
    acting, episode = taken["acting"], taken["episode"]
    row, rows = np.arange(len(acting)), len(acting)
    before = np.maximum.accumulate(np.where(acting, row, -1))
    coming = np.minimum.accumulate(np.where(acting, row, rows)[::-1])[::-1]
    waited = (before >= 0) & (episode[before] == episode)
    owner = np.where(waited, before, np.minimum(coming, rows - 1))
    kept = acting[owner] & (episode[owner] == episode)
    decisions = acting.nonzero()[0]
    place = np.searchsorted(decisions, owner[kept])
    last = kept.nonzero()[0][np.searchsorted(place, np.arange(len(decisions)), side="right") - 1]

    def fold(name: str, column: Array) -> Array:
        if name == "reward" or name.startswith("signal:"):
            return np.bincount(place, weights=column[kept], minlength=len(decisions))
        return column[last] if name in LATER else column[decisions]

    return {name: fold(name, column) for name, column in taken.items()}


def keys(episode: Array, turn: Array, seats: int) -> dict[str, Array]:
    """Which game a decision is of, whose it is, and when; the episodes of a game's seats are numbered in a row."""
    return {"game": episode // seats, "agent": episode % seats, "step": turn}


def views(size: int, seats: int) -> Array:
    """[size, seats]: the rows of a row's game, its own first and then those of the seats after it."""
    row, more = np.arange(size), np.arange(seats)
    return (row // seats * seats)[:, None] + (row[:, None] + more) % seats
