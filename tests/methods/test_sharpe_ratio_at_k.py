"""Two estimators that only their portfolios tell apart."""

from __future__ import annotations

import numpy as np
import pytest

from panoply.methods.generative_offline.sharpe_ratio_at_k import estimators, measure


@pytest.mark.parametrize("seed", range(3))
def test_equal_but_for_the_portfolio(seed: int) -> None:
    true, careful, risky = estimators(seed)
    assert (np.diff(true) < 0).all()
    np.testing.assert_allclose(true + true[::-1], true[0])
    assert sorted(careful) == pytest.approx(sorted(true))
    assert np.argsort(-careful)[:4].tolist() == [0, 2, 3, 4]  # the second best is missing
    assert np.argsort(-risky)[:4].tolist() == [0, 1, 2, 8]  # the second worst is there
    found = measure(seed)
    assert found["squared error"] == pytest.approx(0, abs=1e-12)
    assert found["rank correlation"] == pytest.approx(0, abs=1e-12)
    assert found["SharpeRatio@k"] > 0
