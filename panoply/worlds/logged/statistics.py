"""How good logged data is, and how much it covers (Schweighofer et al. 2022, arXiv 2111.04714).

TQ, trajectory quality: (mean return − g_min)/(g_max − g_min), of the complete episodes; g_min is random's return, g_max
the best known. SACo, state-action coverage: u(D)/u(D_ref), the number of different state-action pairs against that of
a reference. Continuous numbers are put into 100 bins between the limits *of the reference*: with limits of their own,
data sets could not be compared. SACo can exceed 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from panoply.errors import PanoplyError
from panoply.worlds.control.world import Array
from panoply.worlds.logged.data import LoggedData

BINS = 100


def trajectory_quality(data: LoggedData, worst: float, best: float) -> float:
    """TQ; an episode that was broken off does not count."""
    if not best > worst:
        raise PanoplyError(
            f"Trajectory quality needs a best return above the worst, not {best:g} and {worst:g}."
        )
    if not data.complete.any():
        raise PanoplyError("Trajectory quality needs a complete episode.")
    return float((data.returns[data.complete].mean() - worst) / (best - worst))


def unique_pairs(data: LoggedData, reference: LoggedData | None = None) -> int:
    """How many different pairs of a (binned) state and action there are."""
    reference = reference or data
    columns = [_binned(data.columns[name], reference.columns[name]) for name in ("observation", "action")]
    return len(np.unique(np.concatenate(columns, 1), axis=0))


def coverage(data: LoggedData, reference: LoggedData) -> float:
    """SACo."""
    return unique_pairs(data, reference) / unique_pairs(reference)


def log_coverage(data: LoggedData, reference: LoggedData) -> float:
    """lSACo, for large spaces: log u(D)/log u(D_ref)."""
    return math.log(unique_pairs(data, reference)) / math.log(unique_pairs(reference))


def describe(data: LoggedData, worst: float, best: float, reference: LoggedData) -> dict[str, Any]:
    """What is kept beside a data set."""
    returns = data.returns
    lengths = np.diff(np.flatnonzero(data.last), prepend=-1)
    return {
        "steps": len(data),
        "episodes": len(returns),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "return_min": float(returns.min()),
        "return_max": float(returns.max()),
        "length_mean": float(lengths.mean()),
        "return_random": worst,
        "return_expert": best,
        "tq": trajectory_quality(data, worst, best),
        "saco": coverage(data, reference),
        "lsaco": log_coverage(data, reference),
    }


def _binned(values: Array, reference: Array) -> Array:
    """[rows, numbers] as whole numbers; those beyond the limits go into bins beyond the last."""
    flat, limits = values.reshape(len(values), -1), reference.reshape(len(reference), -1)
    if np.issubdtype(flat.dtype, np.integer):
        return flat.astype(np.int64)
    low, high = limits.min(0), limits.max(0)
    width = np.where(high > low, (high - low) / BINS, 1.0)
    bins: Array = np.floor((flat - low) / width).astype(np.int64)
    return np.where(flat == high, BINS - 1, bins)
