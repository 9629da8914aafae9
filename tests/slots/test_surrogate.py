"""Surrogates: values and slopes, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from kit import batch, hand, slopes

from panoply.batch import Batch
from panoply.slots.surrogate.ratios import clip, log_likelihood, ratio

RATIOS = [0.5, 1.0, 1.5]
THEN = math.log(0.5)
NOW = [math.log(0.5 * r) for r in RATIOS]


def rows(advantage: float) -> Batch:
    """Three decisions, taken with probability ½, whose probability is now ¼, ½ and ¾."""
    return batch(hand(advantage=[advantage] * 3, logp=[THEN] * 3), logp=NOW)


@pytest.mark.parametrize(
    ("settings", "advantage", "values", "slope"),
    [
        ({}, 2.0, [1.0, 2.0, 2.6], [1.0, 2.0, 0.0]),
        ({}, -2.0, [-1.6, -2.0, -3.0], [0.0, -2.0, -3.0]),
        ({"kind": "mask"}, 2.0, [0.0, 2.0, 0.0], [0.0, 2.0, 0.0]),
        ({"kind": "mask"}, -2.0, [0.0, -2.0, 0.0], [0.0, -2.0, 0.0]),
        ({"kind": "truncate"}, 2.0, [1.6 * NOW[0], 2 * NOW[1], 2.6 * NOW[2]], [1.6, 2.0, 2.6]),
        ({"kind": "truncate"}, -2.0, [-1.6 * NOW[0], -2 * NOW[1], -2.6 * NOW[2]], [-1.6, -2.0, -2.6]),
        ({"dual": 1.4}, 2.0, [1.0, 2.0, 2.6], [1.0, 2.0, 0.0]),
        ({"dual": 1.4}, -2.0, [-1.6, -2.0, -2.8], [0.0, -2.0, 0.0]),
        ({"dual": 2.0}, -2.0, [-1.6, -2.0, -3.0], [0.0, -2.0, -3.0]),
    ],
)
def test_clip(settings: dict[str, object], advantage: float, values: list[float], slope: list[float]) -> None:
    seen = rows(advantage)
    found, _ = clip(low=0.2, high=0.3, **settings)(seen)
    assert found.tolist() == pytest.approx(values)
    assert slopes(found, seen.now["logp"]) == pytest.approx(slope)


@pytest.mark.parametrize(
    ("advantage", "high", "low"), [(2.0, [0, 0, 1], [0, 0, 0]), (-2.0, [0, 0, 0], [1, 0, 0])]
)
def test_clip_counts_what_it_stopped(advantage: float, high: list[int], low: list[int]) -> None:
    _, stats = clip(low=0.2, high=0.3)(rows(advantage))
    assert stats["clip_high"].tolist() == high
    assert stats["clip_low"].tolist() == low
    _, stats = clip(low=0.2, high=0.3, kind="mask")(rows(advantage))
    assert (stats["clip_high"].tolist(), stats["clip_low"].tolist()) == ([0, 0, 1], [1, 0, 0])
    _, stats = clip(low=0.2, high=0.3, kind="mask")(rows(0.0))
    assert (stats["clip_high"].sum(), stats["clip_low"].sum()) == (0, 0)


def test_log_likelihood() -> None:
    seen = rows(-2.0)
    values, _ = log_likelihood()(seen)
    assert values.tolist() == pytest.approx([-2 * x for x in NOW])
    assert slopes(values, seen.now["logp"]) == [-2.0] * 3


def test_ratio() -> None:
    seen = rows(3.0)
    values, _ = ratio()(seen)
    assert values.tolist() == pytest.approx([1.5, 3.0, 4.5])
    assert slopes(values, seen.now["logp"]) == pytest.approx([1.5, 3.0, 4.5])


def test_ratio_against_a_snapshot() -> None:
    made = hand(advantage=[1.0], logp=[-9.0], **{"logp@old": [math.log(0.25)]})
    seen = batch(made, logp=[math.log(0.5)])
    assert ratio(against="old")(seen)[0].tolist() == pytest.approx([2.0])
    assert clip(against="old")(seen)[0].tolist() == pytest.approx([1.2])
    assert ratio(against="old").needs() == {"logp@old"}
    assert ratio().needs() == frozenset()


def test_ratio_statistics() -> None:
    _, stats = ratio()(rows(1.0))
    assert stats["ratio_max/max"].tolist() == pytest.approx(RATIOS)
    assert stats["ratio_off"].tolist() == [1, 0, 1]
    assert stats["logp_gap"].tolist() == pytest.approx([math.log(2), 0, math.log(1.5)])
    assert stats["kl_behaviour"].tolist() == pytest.approx([math.log(2) - 0.5, 0, 0.5 - math.log(1.5)])


def test_log_ratio_is_bounded_and_wide() -> None:
    seen = batch(hand(advantage=[1.0, 1.0], logp=[-50.0, 0.0]), logp=[0.0, -50.0])
    assert seen.log_ratio().tolist() == [20.0, -20.0]
    small = batch(hand(logp=[0.0]), logp=[1e-12])
    assert small.log_ratio().tolist() == [1e-12], "float64 stays float64"
    column = torch.tensor([-1.0], dtype=torch.bfloat16)
    narrow = Batch(hand(logp=column), {"logp": torch.tensor([-1.5], dtype=torch.bfloat16)})
    assert narrow.log_ratio().dtype == torch.float32
