"""How often at least one of k attempts succeeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from panoply.errors import PanoplyError


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """The unbiased estimate 1 − C(n−c, k)/C(n, k) from n attempts of which c succeeded (arXiv 2107.03374)."""
    if not 1 <= k <= attempts:
        raise PanoplyError(f"pass@{k} needs at least {k} attempts a problem; there are {attempts}.")
    return 1.0 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def mean_pass_at_k(successes: Sequence[int], attempts: int, k: int) -> float:
    """The mean over problems."""
    return sum(pass_at_k(attempts, c, k) for c in successes) / len(successes)


def wilson(rate: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """A 95 % interval for a rate seen in n trials that does not leave [0, 1] (Wilson 1927)."""
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)
