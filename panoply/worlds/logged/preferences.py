"""Preferences over pieces of logged episodes, by an annotator who looks at what they earned."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from panoply.errors import PanoplyError
from panoply.seeds import numpy_rng
from panoply.worlds.control.world import Array
from panoply.worlds.logged.data import LoggedData


class Preferences(NamedTuple):
    """Rows of the data, [pairs, length] each."""

    chosen: Array
    rejected: Array


def preferences(
    data: LoggedData,
    pairs: int,
    length: int = 25,
    *,
    sharpness: float = 1.0,
    flip: float = 0.0,
    seed: int = 0,
) -> Preferences:
    """Pairs of pieces of `length` steps, ordered by P(a ≻ b) = σ(sharpness · (R_a − R_b)).

    R is the undiscounted sum of a piece's rewards (Christiano et al. 2017). With probability `flip` the annotator says
    the opposite of what was meant. No piece crosses from one episode into another.
    """
    if not 0 <= flip <= 1 or sharpness < 0:
        raise PanoplyError("flip is a probability, and sharpness at least 0.")
    starts = _starts(data, length)
    rng = numpy_rng("preferences", seed, pairs, length)
    first, second = (rng.choice(starts, pairs)[:, None] + np.arange(length) for _ in range(2))
    earned = [data.columns["reward"].astype(np.float64)[piece].sum(-1) for piece in (first, second)]
    ahead = 1 / (1 + np.exp(-np.clip(sharpness * (earned[0] - earned[1]), -500, 500)))
    says = (rng.random(pairs) < ahead) ^ (rng.random(pairs) < flip)
    wins = says[:, None]
    return Preferences(np.where(wins, first, second), np.where(wins, second, first))


def _starts(data: LoggedData, length: int) -> Array:
    """Rows at which a piece of that length can begin."""
    episode = data.columns["episode"]
    if length < 1 or length > len(episode):
        raise PanoplyError(f"A piece has 1 to {len(episode)} steps, not {length}.")
    within = episode[: len(episode) - length + 1] == episode[length - 1 :]
    if not within.any():
        raise PanoplyError(f"No logged episode has {length} steps; give a smaller length.")
    return np.flatnonzero(within)
