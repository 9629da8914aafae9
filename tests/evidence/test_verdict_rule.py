"""The rule of the verdict: intervals decide, few are wrong, and what is too small does not matter."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from panoply.evidence.claims import SEEDS, Found, together


@pytest.mark.parametrize(
    ("interval", "margin", "verdict"),
    [
        ((0.01, 0.2), 0.0, "holds"),
        ((-0.2, -0.01), 0.0, "fails"),
        ((-0.01, 0.2), 0.0, "undecided"),
        ((0.0, 0.2), 0.0, "undecided"),
        ((-0.01, 0.2), 0.02, "holds"),
        ((-0.2, -0.03), 0.02, "fails"),
        ((-0.2, -0.01), 0.02, "undecided"),
    ],
)
def test_the_interval_decides(interval: tuple[float, float], margin: float, verdict: str) -> None:
    assert Found(sum(interval) / 2, interval).verdict(margin) == verdict


def test_several_conditions() -> None:
    assert together(["holds", "holds"]) == "holds"
    assert together(["holds", "undecided"]) == "undecided"
    assert together(["undecided", "fails", "holds"]) == "fails"


def test_a_mean_of_differences_with_students_interval() -> None:
    """Mean 3, standard error √(2.5/5); t of four degrees of freedom that |T| passes in 1.98 % of cases: 3.7585."""
    found = Found.of([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 3.7585350541 * math.sqrt(2.5 / 5)
    assert found.difference == pytest.approx(3.0)
    assert found.interval == pytest.approx((3 - half, 3 + half), rel=1e-8)
    assert found.p == pytest.approx(2 * 0.0066, abs=2e-4)
    assert Found.of([0.5] * 5).interval == (0.5, 0.5), "no doubt is left"
    assert Found.of([0.5]).verdict() == "undecided", "one seed says nothing"


def came_to(effect: float, claims: int = 4000) -> Counter[str]:
    """What claims come to whose differences are normal with a deviation of 1 around the effect."""
    draws = np.random.default_rng(0).normal(effect, 1.0, (claims, SEEDS[-1]))
    looks = ((Found.of(row[:n]).verdict() for n in SEEDS) for row in draws)
    return Counter(next((v for v in look if v != "undecided"), "undecided") for look in looks)


def test_where_there_is_no_effect_few_claims_get_a_verdict() -> None:
    """Looking three times with intervals of 95 % would give one to about 9 %."""
    found = came_to(0.0)
    wrong = (found["holds"] + found["fails"]) / found.total()
    assert 0.035 < wrong < 0.06
    assert abs(found["holds"] - found["fails"]) < 0.02 * found.total()


def test_an_effect_of_one_deviation_is_found() -> None:
    found = came_to(1.0, 1000)
    assert found["holds"] > 0.94 * found.total()
    assert found["fails"] == 0


def test_what_fills_little_of_the_room_does_not_matter() -> None:
    found = Found(0.01, (0.005, 0.015))
    assert found.verdict(room=0.1) == "holds"
    assert found.verdict(room=0.3) == "too small to matter"
    assert Found(-0.01, (-0.015, -0.005)).verdict(room=0.3) == "too small to matter"
    assert Found(-0.01, (-0.015, -0.005)).verdict(margin=0.02, room=0.3) == "holds", "no worse is all it says"
    assert together(["holds", "too small to matter"]) == "too small to matter"
    assert together(["undecided", "too small to matter"]) == "undecided"
