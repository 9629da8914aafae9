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


def mean_pass_at_k(successes: Sequence[int], attempts: int | Sequence[int], k: int) -> float:
    """The mean over problems, which may have had different numbers of attempts."""
    tried = [attempts] * len(successes) if isinstance(attempts, int) else attempts
    return sum(pass_at_k(n, c, k) for n, c in zip(tried, successes, strict=True)) / len(successes)
