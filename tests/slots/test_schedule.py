"""Schedules at a few steps of a budget of 10."""

from __future__ import annotations

import math

import pytest

from panoply.parts import Part
from panoply.slots.schedule.schedules import at, constant, cosine, inverse_sqrt, linear, settled


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        (constant(), {0: 1.0, 9: 1.0, 10: 1.0}),
        (constant(warmup=4), {0: 0.25, 1: 0.5, 3: 1.0, 9: 1.0}),
        (linear(), {0: 1.0, 5: 0.5, 10: 0.0, 12: 0.0}),
        (linear(end=0.2), {0: 1.0, 5: 0.6, 10: 0.2}),
        (linear(start=0.5), {0: 1.0, 5: 1.0, 7: 0.6, 10: 0.0}),
        (linear(warmup=2), {0: 0.5, 1: 0.9, 5: 0.5}),
        (cosine(), {0: 1.0, 5: 0.5, 10: 0.0}),
        (cosine(end=0.1), {0: 1.0, 5: 0.55, 10: 0.1}),
        (cosine(warmup=2), {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.5, 10: 0.0, 4: 0.5 * (1 + math.cos(math.pi / 4))}),
    ],
    ids=str,
)
def test_schedule(schedule: Part, steps: dict[int, float]) -> None:
    for step, expected in steps.items():
        assert at(schedule, step, 10) == pytest.approx(expected, abs=1e-12), f"step {step}"


def test_a_number_is_its_own_schedule() -> None:
    assert at(0.3, 7, 10) == 0.3


def test_inverse_sqrt() -> None:
    falling = inverse_sqrt(warmup=4)
    assert [falling(step, 9) for step in (0, 1, 3, 15, 63)] == pytest.approx([0.25, 0.5, 1.0, 0.5, 0.25])


def test_a_warm_up_below_one_is_a_share_of_the_budget() -> None:
    assert [constant(warmup=0.1)(step, 40) for step in (0, 1, 3, 4)] == [0.25, 0.5, 1.0, 1.0]
    assert [constant(warmup=1)(step, 40) for step in (0, 1)] == [1.0, 1.0]
    assert cosine(warmup=0.5)(1, 4) == 1.0
    assert cosine(warmup=0.5)(4, 4) == pytest.approx(0.0)


@pytest.mark.parametrize("warmup", [0, 1, 3, 3.5, 0.25])
def test_what_a_constant_schedule_settles_at(warmup: float) -> None:
    """Asked once at set-up, it gives in every step what the schedule gives: its warm-up, then 1."""
    held = constant(warmup=warmup)
    known = settled(held, 10)
    assert [known[min(step, len(known) - 1)] for step in range(10)] == [
        at(held, step, 10) for step in range(10)
    ]
    assert known[-1] == 1.0


def test_only_what_stays_is_settled() -> None:
    assert settled(0.5, 10) == [0.5]
    assert settled(linear(), 10) == []
    assert settled(cosine(warmup=2), 10) == []
