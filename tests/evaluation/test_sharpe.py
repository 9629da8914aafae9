"""SharpeRatio@k by hand, and where it tells apart what mean squared error does not."""

from __future__ import annotations

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.evaluation.sharpe import portfolio, sharpe_ratio_at_k


def test_by_hand() -> None:
    """Top three by estimate are worth 5, 1 and 3: best 5, std 2; against a behaviour of 2 that is 3/2."""
    estimated, true = np.array([9.0, 8.0, 7.0, 1.0]), np.array([5.0, 1.0, 3.0, 10.0])
    assert sharpe_ratio_at_k(estimated, true, 2.0, 3) == pytest.approx(1.5)
    assert portfolio(estimated, true, 3, threshold=2.0) == (5, 1, 3, 2, pytest.approx(1 / 3))
    assert sharpe_ratio_at_k(estimated, true, 6.0, 3) == 0
    assert sharpe_ratio_at_k(estimated, np.full(4, 3.0), 2.0, 3) == 100


def test_overestimating_bad_policies_is_worse_than_underestimating_good_ones() -> None:
    """Ten policies worth 1 … 10: one underrates the second best by 9, the other overrates the second worst by 9."""
    true = np.arange(1.0, 11.0)
    safe, risky = true.copy(), true.copy()
    safe[8] -= 9.0
    risky[1] += 9.0
    assert ((safe - true) ** 2).mean() == ((risky - true) ** 2).mean()
    for k in (2, 3, 4):
        assert sharpe_ratio_at_k(safe, true, 5.0, k) > sharpe_ratio_at_k(risky, true, 5.0, k)


def test_no_spread_of_one() -> None:
    with pytest.raises(PanoplyError, match="k is from 2"):
        portfolio(np.ones(3), np.ones(3), 1)
    with pytest.raises(PanoplyError, match="for each policy"):
        portfolio(np.ones(3), np.ones(2), 2)
