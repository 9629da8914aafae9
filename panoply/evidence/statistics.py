"""Statistics of a few noisy runs (Agarwal et al. 2021, arXiv 2108.13264).

Scores are arrays `[runs, tasks]`: one column a world, one row a seed; a list of numbers is one column.
"""

from __future__ import annotations

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
