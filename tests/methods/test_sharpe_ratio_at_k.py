"""Two estimators that only their portfolios tell apart."""

from __future__ import annotations

import numpy as np
import pytest

from panoply.evaluation.sharpe import sharpe_ratio_at_k
from panoply.methods.generative_offline.sharpe_ratio_at_k import estimators, judged, logged_values, measure


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


def test_estimators_of_logged_data() -> None:
    """All are near the truth of most policies, and DR nearer than PDIS; which picks best depends on k, not on error."""
    true, behaviour, estimates = logged_values(0, 400)
    assert set(estimates) == {"DM", "PDIS", "WPDIS", "DR"}
    assert true.std() > 0.1
    assert true.min() < behaviour < true.max()
    error = {name: float(np.abs(of - true).mean()) for name, of in estimates.items()}
    assert error["DR"] < error["PDIS"]
    assert error["DR"] < 0.3 * true.std()
    found = judged(0, 400)
    for k in (2, 6, 12):
        by_hand = sharpe_ratio_at_k(estimates["PDIS"], true, behaviour, k)
        assert found["PDIS"][f"@{k}"] == pytest.approx(by_hand)
    orders = {tuple(sorted(found, key=lambda name: -found[name][f"@{k}"])) for k in range(2, 13)}
    assert len(orders) > 1, "the order of estimators changes with k"
    assert found["DM"]["@12"] == pytest.approx(found["DR"]["@12"]), "deploying all of them, all are alike"
