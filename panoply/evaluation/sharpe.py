"""SharpeRatio@k: an off-policy estimator judged by the policies it picks (Kiyohara et al. 2024, arXiv 2311.18207).

    SharpeRatio@k = max(best true value among its top k − J(behaviour), 0) / std of the k true values

Deploying the k policies an estimator ranks highest earns the best of them and risks the spread among them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from panoply.errors import PanoplyError

Array = NDArray[Any]


class Portfolio(NamedTuple):
    """The true values of an estimator's k favourites."""

    best: float
    worst: float
    mean: float
    std: float
    """With k − 1 in the denominator."""
    violations: float
    """The share of them below a threshold."""


def portfolio(estimated: Array, true: Array, k: int, threshold: float = -np.inf) -> Portfolio:
    """Of the k policies that are estimated highest; equal ones in their order."""
    estimated, true = np.asarray(estimated, np.float64), np.asarray(true, np.float64)
    if estimated.shape != true.shape or estimated.ndim != 1:
        raise PanoplyError("An estimate and a true value are needed for each policy.")
    if not 2 <= k <= len(true):
        raise PanoplyError(f"k is from 2, below which there is no spread, to {len(true)} policies, not {k}.")
    kept = true[np.argsort(-estimated, kind="stable")[:k]]
    return Portfolio(
        float(kept.max()),
        float(kept.min()),
        float(kept.mean()),
        float(kept.std(ddof=1)),
        float((kept < threshold).mean()),
    )


def sharpe_ratio_at_k(estimated: Array, true: Array, behaviour: float, k: int, cap: float = 100.0) -> float:
    """Look at the portfolio too: among nearly equal policies the ratio explodes, and is cut at `cap`."""
    picked = portfolio(estimated, true, k)
    gain = max(picked.best - behaviour, 0.0)
    if gain == 0:
        return 0.0
    return min(gain / picked.std, cap) if picked.std else cap
