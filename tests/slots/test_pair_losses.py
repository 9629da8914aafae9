"""Losses on pairs beside DPO's: values and slopes, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from kit import batch, hand, slopes

from panoply.batch import Batch
from panoply.errors import PanoplyError
from panoply.methods.base.orpo import log_odds, odds_ratio
from panoply.planning import make_plan
from panoply.slots.loss.pairs import chosen_nll, episode_scores, hinge, logistic, squared
from panoply.slots.surrogate.preferences import preference


def preferences() -> Batch:
    """Episode 3 has two decisions. Sums of log π: 3 → −2, 5 → −4, 8 → −2; of log π/π_ref: 3, 0, −1."""
    made = hand(
        episode=[8, 3, 3, 5],
        **{"logp@reference": [-1.0, -2.0, -3.0, -4.0]},
        pairs=[(3, 8), (5, 3)],
    )
    return batch(made, logp=[-2.0, -0.5, -1.5, -4.0])


def test_scores() -> None:
    seen = preferences()
    assert episode_scores(seen, "reference").tolist() == [3.0, 0.0, -1.0]
    assert episode_scores(seen, "reference", per_token=True).tolist() == [1.5, 0.0, -1.0]
    assert episode_scores(seen, None).tolist() == [-2.0, -4.0, -2.0]
    assert episode_scores(seen, None, per_token=True).tolist() == [-1.0, -4.0, -2.0]


def test_squared() -> None:
    """Gaps 4 and −3, target 1/(2·0.25) = 2; the slope is twice the distance, also where the gap is past the target."""
    seen = preferences()
    values, stats = squared(beta=0.25)(seen)
    assert values.tolist() == [4.0, 25.0]
    assert slopes(values, seen.now["logp"]) == [-4.0, 14.0, 14.0, -10.0]
    assert stats["margin"].tolist() == [1.0, -0.75]
    assert stats["accuracy"].tolist() == [1.0, 0.0]


def test_squared_per_token() -> None:
    """Gaps 1.5 + 1 and 0 − 1.5: a decision of the two-token episode has half the slope."""
    seen = preferences()
    values, _ = squared(beta=0.25, per_token=True)(seen)
    assert values.tolist() == [0.25, 12.25]
    assert slopes(values, seen.now["logp"]) == [-1.0, 4.0, 4.0, -7.0]


def test_hinge() -> None:
    """Without a reference: leads 0 and −2 under a margin of 1; with one the first pair's lead of 4 leaves it alone."""
    seen = preferences()
    values, _ = hinge(margin=1.0)(seen)
    assert values.tolist() == [1.0, 3.0]
    assert slopes(values, seen.now["logp"]) == [1.0, 0.0, 0.0, -1.0]
    seen = preferences()
    values, _ = hinge(beta=0.5, margin=1.0, to="reference")(seen)
    assert values.tolist() == [0.0, 2.5]
    assert slopes(values, seen.now["logp"]) == [0.0, 0.5, 0.5, -0.5]


def test_simpo() -> None:
    """β·(mean − mean) − γ = 2·(−1 + 2) − 1 = 1 and 2·(−4 + 1) − 1 = −7."""
    seen = preferences()
    values, stats = logistic(beta=2.0, gamma=1.0, to=None, per_token=True)(seen)
    assert values.tolist() == pytest.approx([math.log(1 + math.exp(-1)), math.log(1 + math.exp(7))])
    first, second = 2 / (1 + math.e), 2 / (1 + math.exp(-7))
    assert slopes(values, seen.now["logp"]) == pytest.approx(
        [first, (second - first) / 2, (second - first) / 2, -second]
    )
    assert stats["accuracy"].tolist() == [1.0, 0.0], "who leads, not who leads by enough"


def test_chosen_nll() -> None:
    seen = preferences()
    values, _ = chosen_nll()(seen)
    assert values.tolist() == [1.0, 4.0]
    assert slopes(values, seen.now["logp"]) == [0.0, -0.5, -0.5, -1.0]
    assert chosen_nll(per_token=False)(preferences())[0].tolist() == [2.0, 4.0]


def test_odds_ratio() -> None:
    """P = ½ has odds 1, P = ¼ has ⅓: −log σ(log 3) = log 4/3. The slope of log odds is 1/(1 − P)."""
    made = hand(episode=[0, 0, 1], pairs=[(0, 1)])
    seen = batch(made, logp=[math.log(0.25), math.log(1.0), math.log(0.25)])
    values, stats = odds_ratio()(seen)
    assert values.tolist() == pytest.approx([math.log(4 / 3)])
    assert stats["margin"].tolist() == pytest.approx([math.log(3)])
    assert slopes(values, seen.now["logp"]) == pytest.approx([-0.25, -0.25, 1 / 3])


def test_log_odds_near_certainty() -> None:
    for p in (1e-9, 0.3, 0.7, 1 - 1e-6):
        assert float(log_odds(torch.tensor(math.log(p), dtype=torch.float64))) == pytest.approx(
            math.log(p / (1 - p))
        )
    certain = torch.zeros(1, requires_grad=True)
    log_odds(certain).sum().backward()  # type: ignore[no-untyped-call]
    assert math.isfinite(float(log_odds(certain.detach())))
    assert certain.grad is not None
    assert certain.grad.isfinite().all()


@pytest.mark.parametrize("loss", [logistic(beta=0.5), squared(), hinge(), odds_ratio()])
def test_as_a_surrogate_it_is_ascended(loss: object) -> None:
    """The same numbers with the other sign, and what the loss needs is needed."""
    part = preference(loss=loss)
    values, stats = part(preferences())
    expected, same = loss(preferences())  # type: ignore[operator]
    assert values.tolist() == (-expected).tolist()
    assert stats.keys() == same.keys()
    assert part.needs() == loss.needs()  # type: ignore[attr-defined]


def test_needs() -> None:
    assert logistic().needs() == {"logp@reference"}
    assert logistic(to=None).needs() == frozenset()
    assert squared(to="old").needs() == {"logp@old"}
    with pytest.raises(PanoplyError, match="Unknown snapshot 'behaviour'"):
        make_plan("online-dpo", settings={"surrogate.loss.to": "behaviour"})
