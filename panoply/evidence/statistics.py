"""Statistics of a few noisy runs (Agarwal et al. 2021, arXiv 2108.13264).

Scores are arrays `[runs, tasks]`: one column a world, one row a seed; a list of numbers is one column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
DRAWS = 10_000


def table(scores: ArrayLike) -> Floats:
    """Scores as `[runs, tasks]`."""
    found = np.asarray(scores, dtype=np.float64)
    return found[:, None] if found.ndim == 1 else found


def interquartile_mean(scores: ArrayLike, axis: int | None = None) -> Floats:
    """The mean of the middle half, over everything or along an axis.

    ⌊n/4⌋ values are left out at either end: with fewer than four it is the plain mean.
    """
    found = np.asarray(scores, dtype=np.float64)
    found = np.sort(found.reshape(-1) if axis is None else np.moveaxis(found, axis, -1), axis=-1)
    n = found.shape[-1]
    return np.asarray(found[..., n // 4 : n - n // 4].mean(-1))


def resamples(scores: ArrayLike, draws: int = DRAWS, seed: int = 0) -> Floats:
    """`[draws, runs, tasks]`: runs drawn with replacement within each task, which is the stratum."""
    found = table(scores)
    runs, tasks = found.shape
    chosen = np.random.default_rng(seed).integers(runs, size=(draws, runs, tasks))
    return np.take_along_axis(found[None], chosen, axis=1)


def interval(
    scores: ArrayLike,
    statistic: Callable[[Floats], Floats] | None = None,
    *,
    level: float = 0.95,
    draws: int = DRAWS,
    seed: int = 0,
) -> tuple[float, float]:
    """A stratified bootstrap interval, by percentiles, of the interquartile mean or another statistic.

    statistic   takes `[draws, runs, tasks]` and gives one number a draw
    """
    drawn = resamples(scores, draws, seed)
    values = interquartile_mean(drawn.reshape(len(drawn), -1), 1) if statistic is None else statistic(drawn)
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def student_tail(t: float, freedom: int) -> float:
    """P(|T| > |t|) of Student's distribution with whole degrees of freedom, in closed form (Abramowitz, 26.7.3–4)."""
    angle = math.atan2(abs(t), math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = math.sin(angle) * (cosine if odd else 1.0)
    inside = angle if odd else 0.0
    for k in range(1 + odd, freedom, 2):
        inside += term
        term *= cosine**2 * k / (k + 1)
    return max(0.0, 1.0 - inside * (2 / math.pi if odd else 1.0))


def student_bound(tail: float, freedom: int) -> float:
    """The t that |T| passes with that probability."""
    low, high = 0.0, 1.0
    while student_tail(high, freedom) > tail:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, freedom) > tail else (low, middle)
    return high


def mean_interval(values: Sequence[float], tail: float) -> tuple[float, float, float]:
    """The mean, half the width of its interval by Student's t, and the p-value of a mean of 0.

    `tail` is how often such an interval misses. Values that are all equal leave no doubt: a width of 0.
    """
    mean, n = float(np.mean(values)), len(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    if error < 1e-12 * abs(mean) or error == 0.0:
        return mean, 0.0, float(mean == 0.0)
    if n < 2:
        return mean, math.inf, 1.0
    return mean, student_bound(tail, n - 1) * error, student_tail(mean / error, n - 1)


def false_discoveries(p_values: Sequence[float], rate: float = 0.05) -> int:
    """How many of the smallest p-values stand, where `rate` of those that stand may be false.

    The rule of Benjamini and Hochberg (1995).
    """
    ranked = sorted(p_values)
    return max((k for k, p in enumerate(ranked, 1) if p <= rate * k / len(ranked)), default=0)


def improvement(first: ArrayLike, second: ArrayLike) -> float:
    """P(a run of the first scores higher than a run of the second), ties halved, averaged over tasks."""
    return float(_improvement(table(first)[None], table(second)[None])[0])


def improvement_interval(
    first: ArrayLike, second: ArrayLike, *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Both sides are drawn again, each by its own tasks."""
    values = _improvement(resamples(first, draws, seed), resamples(second, draws, seed + 1))
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _improvement(first: Floats, second: Floats) -> Floats:
    """Of `[draws, runs, tasks]` on both sides: Mann–Whitney's U over the number of pairs."""
    ahead = first[:, :, None, :] - second[:, None, :, :]
    return np.asarray(((ahead > 0) + 0.5 * (ahead == 0)).mean((1, 2, 3)))


def profile(scores: ArrayLike, thresholds: Sequence[float]) -> Floats:
    """The performance profile: the share of runs, over all tasks, that score above each threshold."""
    found = table(scores).reshape(-1)
    return np.asarray((found[:, None] > np.asarray(thresholds)[None, :]).mean(0))


def on_grid(curve: Sequence[tuple[float, float]], grid: Sequence[float]) -> Floats:
    """A curve of (budget, score) at the points of a grid: straight lines between points, flat beyond them."""
    x, y = np.asarray(curve, dtype=np.float64).T
    return np.asarray(np.interp(np.asarray(grid, dtype=np.float64), x, y))


def area(curve: Sequence[tuple[float, float]], budget: float) -> float:
    """The area under a curve from 0 to the budget, as a share of the budget: the mean height."""
    inside = [x for x, _ in curve if 0 < x < budget]
    grid = np.asarray([0.0, *inside, budget])
    return float(np.trapezoid(on_grid(curve, list(grid)), grid) / budget)


def band(
    curves: ArrayLike, *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> tuple[Floats, Floats, Floats]:
    """Of curves `[runs, points]`: the interquartile mean at each point, and the ends of its interval.

    Whole runs are drawn, so the band of a point is what `interval` gives for it.
    """
    found = np.asarray(curves, dtype=np.float64)
    chosen = np.random.default_rng(seed).integers(len(found), size=(draws, len(found)))
    drawn = interquartile_mean(found[chosen], 1)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return interquartile_mean(found, 0), low, high


def spearman(first: ArrayLike, second: ArrayLike) -> float:
    """The correlation of ranks, equal values sharing the mean of theirs; 0 where one side is all equal."""
    ranks = []
    for values in (np.asarray(first, np.float64), np.asarray(second, np.float64)):
        below, upto = (np.searchsorted(np.sort(values), values, side) for side in ("left", "right"))
        ranks.append((below + upto) / 2)
    x, y = (rank - rank.mean() for rank in ranks)
    size = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / size if size else 0.0
