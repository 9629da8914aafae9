"""The statistics, by hand, against slow references, and against rliable where it is installed."""

from __future__ import annotations

import statistics as plain
from typing import Any

import numpy as np
import pytest

from panoply.evidence import statistics

SCORES = np.random.default_rng(3).normal(size=(9, 4)) * [1, 2, 3, 0.5] + [0, 1, 0, 2]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([5, 1, 2, 100, 4, 3, -70, 6], 3.5), ([1, 2, 6], 3.0), ([0, 1, 2, 9, 4], 7 / 3), ([7], 7.0)],
)
def test_the_interquartile_mean_by_hand(scores: list[float], expected: float) -> None:
    assert statistics.interquartile_mean(scores) == pytest.approx(expected)


def test_along_an_axis() -> None:
    expected = [float(statistics.interquartile_mean(SCORES[:, i])) for i in range(4)]
    assert statistics.interquartile_mean(SCORES, 0) == pytest.approx(expected)


def test_resamples_never_mix_tasks() -> None:
    drawn = statistics.resamples(SCORES, 50)
    assert drawn.shape == (50, 9, 4)
    for task in range(4):
        assert set(drawn[:, :, task].ravel()) <= set(SCORES[:, task])
    assert len(set(drawn[:, :, 0].ravel())) == 9
    same_rows = [(d, r) for d in range(50) for r in range(9) if drawn[d, r].tolist() in SCORES.tolist()]
    assert len(same_rows) < 10, "tasks are drawn independently of each other"


def test_an_interval_by_hand() -> None:
    """Two runs: a draw is (0, 0), (0, 1), (1, 0) or (1, 1), so its mean is 0, ½ or 1 with chances ¼, ½, ¼."""
    assert statistics.interval([0.0, 1.0]) == (0.0, 1.0)
    assert statistics.interval([0.0, 1.0], level=0.4) == (0.5, 0.5)
    assert statistics.interval([2.0, 2.0, 2.0]) == (2.0, 2.0)


def test_the_interval_of_a_slow_bootstrap() -> None:
    rng = np.random.default_rng(11)
    found = []
    for _ in range(4000):
        drawn = [SCORES[rng.integers(9), task] for task in range(4) for _ in range(9)]
        middle = sorted(drawn)[9:27]
        found.append(plain.fmean(middle))
    expected = np.quantile(found, [0.025, 0.975])
    assert statistics.interval(SCORES) == pytest.approx(expected, abs=0.04)


def test_another_statistic() -> None:
    low, high = statistics.interval(SCORES, lambda drawn: drawn.mean((1, 2)))
    assert low < SCORES.mean() < high


def test_improvement_by_hand() -> None:
    # task 1: 1 of 4 pairs ahead, 1 tied; task 2: all 4 ahead
    assert statistics.improvement([[1, 5], [2, 6]], [[2, 1], [0, 1]]) == pytest.approx((2.5 / 4 + 1) / 2)
    assert statistics.improvement([1, 2], [1, 2]) == 0.5
    assert statistics.improvement_interval([3.0, 4.0], [1.0, 2.0]) == (1.0, 1.0)


def test_profile_by_hand() -> None:
    assert statistics.profile([[0.1, 0.9], [0.5, 0.5]], [0.0, 0.1, 0.5, 0.9]).tolist() == [
        1.0,
        0.75,
        0.25,
        0.0,
    ]


def test_area_by_hand() -> None:
    assert statistics.area([(0, 0.0), (10, 1.0)], 10) == pytest.approx(0.5)
    assert statistics.area([(0, 0.0), (5, 1.0), (20, 1.0)], 10) == pytest.approx(0.75)
    assert statistics.area([(0, 0.2), (5, 0.2)], 10) == pytest.approx(0.2), "flat after its last point"


# ------------------------------------------------------------------ rliable


@pytest.fixture
def rliable(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("rliable")
    # arch, which rliable draws with, was written for a pandas in which this decorator took two words
    monkeypatch.setattr("pandas.util._decorators.deprecate_kwarg", lambda *_, **__: lambda f: f)
    from rliable import library, metrics

    return library, metrics


def test_point_estimates_are_rliables(rliable: Any) -> None:
    library, metrics = rliable
    other = SCORES[:7] + 0.3
    assert statistics.interquartile_mean(SCORES) == pytest.approx(metrics.aggregate_iqm(SCORES))
    assert statistics.improvement(SCORES, other) == pytest.approx(
        metrics.probability_of_improvement(SCORES, other)
    )
    taus = np.linspace(-2, 4, 13)
    profiles, _ = library.create_performance_profile({"a": SCORES}, taus, reps=2)
    assert statistics.profile(SCORES, list(taus)) == pytest.approx(profiles["a"])


def test_intervals_are_rliables(rliable: Any) -> None:
    """Both are drawn at random: with 3000 and 400 draws the ends have errors of about 0.01."""
    library, metrics = rliable
    rng = np.random.RandomState(5)
    _, theirs = library.get_interval_estimates(
        {"a": SCORES}, lambda x: np.array([metrics.aggregate_iqm(x)]), reps=3000, random_state=rng
    )
    assert statistics.interval(SCORES, draws=20_000) == pytest.approx(theirs["a"][:, 0], abs=0.05)
    other = SCORES[:7] + 0.3
    _, theirs = library.get_interval_estimates(
        {"a": (SCORES, other)}, lambda x, y: np.array([metrics.probability_of_improvement(x, y)]),
        reps=400, random_state=rng,
    )  # fmt: skip
    ours = statistics.improvement_interval(SCORES, other, draws=4000)
    assert ours == pytest.approx(theirs["a"][:, 0], abs=0.04)


def test_spearman() -> None:
    """By hand: ranks 1, 2.5, 2.5, 4 against 1, 3, 2, 4 are 4.5 / √(4.5·5) alike."""
    assert statistics.spearman([1, 5, 5, 9], [10, 30, 20, 40]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert statistics.spearman([1, 2, 3], [9, 8, -7]) == pytest.approx(-1)
    assert statistics.spearman([1, 1, 1], [1, 2, 3]) == 0


def test_students_distribution() -> None:
    """Against tables: P(|T| > 2.776) with 4 degrees of freedom is 5 %, > 2.093 with 19, > 12.706 with 1."""
    for t, freedom in (
        (2.776445105, 4),
        (2.093024054, 19),
        (12.70620474, 1),
        (4.30265273, 2),
        (3.182446305, 3),
    ):
        assert statistics.student_tail(t, freedom) == pytest.approx(0.05, abs=1e-9)
        assert statistics.student_bound(0.05, freedom) == pytest.approx(t, abs=1e-7)
    assert statistics.student_tail(-2.7764, 4) == statistics.student_tail(2.7764, 4)
    assert statistics.student_tail(0.0, 7) == 1.0


def test_false_discoveries() -> None:
    """Benjamini and Hochberg's own example: of fifteen p-values, the four smallest stand at 5 %."""
    small = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459]
    p = [*small, 0.3240, 0.4262, 0.5719, 0.6528, 0.7590, 1.0]
    assert statistics.false_discoveries(p) == 4
    assert statistics.false_discoveries([]) == 0
