"""Which estimator of policies' values picks a good portfolio at little risk?"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from panoply.evaluation.sharpe import sharpe_ratio_at_k
from panoply.evidence.claims import Ahead
from panoply.registry import protocol
from panoply.seeds import numpy_rng

Array = NDArray[Any]
POLICIES = 10
PORTFOLIOS = range(4, 8)
"""The numbers of policies that are deployed: those among which a wrong one can be."""


def estimators(seed: int) -> tuple[Array, Array, Array]:
    """True values, best first, and two estimates of them, equal in squared error and in rank correlation.

    The first takes a near-best policy for a poor one, the second a near-worst one for a good one: the first seen from
    below, with true values that lie symmetrically.
    """
    gaps = numpy_rng("sharpe", seed).uniform(0.5, 1.5, POLICIES // 2)
    true = np.append(0, np.cumsum(np.concatenate([gaps, gaps[-2::-1]])))[::-1]
    order = [0, 2, 3, 4, 5, 6, 1, 7, 8, 9]
    careful = np.empty(POLICIES)
    careful[order] = true
    risky = true[0] - careful[::-1]
    return true, careful, risky


def measure(seed: int) -> dict[str, float]:
    """By how much the careful estimator's ratio is higher, on average over the sizes of portfolios."""
    true, careful, risky = estimators(seed)
    behaviour = float(np.median(true))
    ratio = [
        np.mean([sharpe_ratio_at_k(of, true, behaviour, k) for k in PORTFOLIOS]) for of in (careful, risky)
    ]
    errors = [float(((of - true) ** 2).mean()) for of in (careful, risky)]
    ranks = [float(np.corrcoef(_ranks(of), _ranks(true))[0, 1]) for of in (careful, risky)]
    return {
        "SharpeRatio@k": float(ratio[0] - ratio[1]),
        "squared error": errors[0] - errors[1],
        "rank correlation": ranks[0] - ranks[1],
    }


def _ranks(values: Array) -> Array:
    return np.argsort(np.argsort(values))


CLAIM = Ahead(
    "Of two estimators equal in squared error and in rank correlation, SharpeRatio@k prefers the one that underrates "
    "near-best policies to the one that overrates near-worst ones.",
    measure,
)


@protocol("sharpe-ratio-at-k@1", paper=28, claim=CLAIM)
def sharpe(seed: int = 0) -> dict[str, float]:
    """SharpeRatio@k (arXiv 2311.18207): an off-policy estimator is judged by deploying the k policies it ranks highest.

    max(best true value among them − J(behaviour), 0) over the deviation of their true values: what is gained by the
    best of them, per risk taken while finding out which it is (`panoply.evaluation.sharpe`).
    """
    return measure(seed)
