"""pass@k and the Wilson interval, worked by hand."""

from __future__ import annotations

import itertools

import pytest

from panoply.errors import PanoplyError
from panoply.evaluation.intervals import wilson
from panoply.evaluation.pass_at_k import mean_pass_at_k, pass_at_k


@pytest.mark.parametrize(
    ("attempts", "successes", "k", "expected"),
    [
        (4, 0, 2, 0.0),
        (4, 4, 2, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 2, 2, 5 / 6),
        (4, 2, 3, 1.0),
        (5, 2, 3, 0.9),
    ],
)
def test_pass_at_k(attempts: int, successes: int, k: int, expected: float) -> None:
    assert pass_at_k(attempts, successes, k) == pytest.approx(expected)
    outcomes = [1] * successes + [0] * (attempts - successes)
    draws = list(itertools.combinations(outcomes, k))
    assert pass_at_k(attempts, successes, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))


def test_pass_at_k_needs_k_attempts() -> None:
    with pytest.raises(PanoplyError, match="at least 8 attempts"):
        pass_at_k(4, 1, 8)
    with pytest.raises(PanoplyError):
        pass_at_k(4, 1, 0)


def test_mean_pass_at_k() -> None:
    assert mean_pass_at_k([0, 1, 4], attempts=4, k=2) == pytest.approx((0.0 + 0.5 + 1.0) / 3)


def test_wilson() -> None:
    assert wilson(0.5, 100) == pytest.approx((0.403830, 0.596170), abs=1e-6)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.277533), abs=1e-5)
    assert wilson(1.0, 10) == pytest.approx((0.722467, 1.0), abs=1e-5)
