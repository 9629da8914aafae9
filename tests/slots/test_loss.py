"""Losses on given data: values and slopes, worked by hand."""

from __future__ import annotations

import math

import pytest
from kit import batch, hand, slopes

from panoply.batch import Batch
from panoply.slots.loss.imitation import nll
from panoply.slots.loss.pairs import logistic


def test_nll() -> None:
    seen = batch(hand(action=[0, 1]), logp=[-0.5, -2.0])
    values, stats = nll()(seen)
    assert values.tolist() == [0.5, 2.0]
    assert stats["nll"].tolist() == [0.5, 2.0]
    assert slopes(values, seen.now["logp"]) == [-1.0, -1.0]


def preferences() -> Batch:
    """Episode 3 (two decisions) over 8 with l = 3 − (−1), and 5 over 3 with l = 0 − 3."""
    made = hand(
        episode=[8, 3, 3, 5],
        **{"logp@reference": [-1.0, -2.0, -3.0, -4.0]},
        pairs=[(3, 8), (5, 3)],
    )
    return batch(made, logp=[-2.0, -1.0, -1.0, -4.0])


@pytest.mark.parametrize(
    ("smoothing", "values"),
    [
        (0.0, [math.log(1 + math.exp(-2.0)), math.log(1 + math.exp(1.5))]),
        (0.1, [0.9 * math.log(1 + math.exp(-2.0)) + 0.1 * math.log(1 + math.exp(2.0)),
               0.9 * math.log(1 + math.exp(1.5)) + 0.1 * math.log(1 + math.exp(-1.5))]),
    ],
)  # fmt: skip
def test_logistic(smoothing: float, values: list[float]) -> None:
    seen = preferences()
    found, stats = logistic(beta=0.5, smoothing=smoothing)(seen)
    assert found.tolist() == pytest.approx(values)
    assert stats["margin"].tolist() == pytest.approx([2.0, -1.5])
    assert stats["accuracy"].tolist() == [1.0, 0.0]
    assert stats["chosen_logratio"].tolist() == pytest.approx([3.0, 0.0])
    assert stats["rejected_logratio"].tolist() == pytest.approx([-1.0, 3.0])


def test_logistic_slopes() -> None:
    """β·σ(−margin) up on the chosen, down on the rejected; episode 3 is on both sides."""
    seen = preferences()
    found, _ = logistic(beta=0.5)(seen)
    first, second = 0.5 / (1 + math.exp(2.0)), 0.5 / (1 + math.exp(-1.5))
    expected = [first, second - first, second - first, -second]
    assert slopes(found, seen.now["logp"]) == pytest.approx(expected)
