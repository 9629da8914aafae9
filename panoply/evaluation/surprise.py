"""How surprising an episode is: paid well for what nobody expected. Where a reward is hacked, it shows here first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray


def surprise(returns: ArrayLike, oddness: ArrayLike) -> NDArray[np.float64]:
    """rank(return)·rank(oddness), from 0 to 1; oddness is the mean −log-probability of an episode's decisions.

    Ranks and not numbers, since rewards and log-probabilities have no common scale. An episode without one of the two
    is not surprising.
    """
    return _ranks(returns) * _ranks(oddness)


def _ranks(values: ArrayLike) -> NDArray[np.float64]:
    """The share of values below each, equal ones counted half."""
    x = np.asarray(values, dtype=np.float64)
    known = np.sort(x[~np.isnan(x)])
    if not len(known):
        return np.zeros_like(x)
    below, upto = np.searchsorted(known, x, "left"), np.searchsorted(known, x, "right")
    return np.where(np.isnan(x), 0.0, (below + upto) / (2 * len(known)))


def oddness(logp: Sequence[float | None]) -> float:
    """Mean −log-probability of the decisions that have one; not a number where none has."""
    known = [x for x in logp if x is not None]
    return -sum(known) / len(known) if known else float("nan")
