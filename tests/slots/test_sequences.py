"""Ratios of whole episodes: values and slopes, worked by hand."""

from __future__ import annotations

import math

import pytest
from kit import batch, hand, slopes

from panoply.batch import Batch
from panoply.slots.surrogate.sequences import sequence_clip

TWO, HALF = math.log(2), math.log(0.5)


def rows(advantage: float) -> Batch:
    """Episode 1: ratios 2 and ½, so s = 1. Episode 2: ratio 4 and 1, so s = 2. Episode 3: ratio ½."""
    made = hand(episode=[1, 1, 2, 2, 3], advantage=[advantage] * 5, logp=[-2.0] * 5)
    return batch(made, logp=[-2 + TWO, -2 + HALF, -2 + 2 * TWO, -2.0, -2 + HALF])


@pytest.mark.parametrize("form", ["episode", "decision"])
@pytest.mark.parametrize(
    ("advantage", "values", "slope"),
    [
        (3.0, [3.0, 3.9, 1.5], [1.5, 1.5, 0, 0, 1.5]),
        (-3.0, [-3.0, -6.0, -2.4], [-1.5, -1.5, -3.0, -3.0, 0]),
    ],
)
def test_sequence_clip(form: str, advantage: float, values: list[float], slope: list[float]) -> None:
    """s·A/|y| on each decision of an episode that is inside, and nothing on one that is outside."""
    seen = rows(advantage)
    found, _ = sequence_clip(low=0.2, high=0.3, advantage=form)(seen)
    assert found.tolist() == pytest.approx(values)
    assert slopes(found, seen.now["logp"]) == pytest.approx(slope)


def test_decisions_with_their_own_advantages() -> None:
    """GSPO-token: s = 1, so each decision has its own A over the episode's length."""
    made = hand(episode=[1, 1], advantage=[1.0, -4.0], logp=[-2.0, -2.0])
    seen = batch(made, logp=[-2 + TWO, -2 + HALF])
    found, _ = sequence_clip(advantage="decision")(seen)
    assert found.tolist() == pytest.approx([-1.5])
    assert slopes(found, seen.now["logp"]) == pytest.approx([0.5, -2.0])


def test_statistics() -> None:
    _, stats = sequence_clip(low=0.2, high=0.3)(rows(1.0))
    assert stats["clip_high"].tolist() == [0, 1, 0]
    assert stats["clip_low"].tolist() == [0, 0, 0]
    assert stats["sequence_ratio_max/max"].tolist() == pytest.approx([1, 2, 0.5])
    _, stats = sequence_clip(low=0.2, high=0.3)(rows(-1.0))
    assert (stats["clip_high"].tolist(), stats["clip_low"].tolist()) == ([0, 0, 0], [0, 0, 1])


def test_it_never_cuts_an_episode() -> None:
    assert sequence_clip().info.unit == "episode"
    assert sequence_clip(against="old").needs() == {"logp@old"}
