"""REC, REP and RED: masks by hand, the pairwise loss, dropping, and parity with the released equations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kit import Slow, assert_same, batch, gradient, hand, ragged, rows_of, shuffled, slopes
from papers import ZERO, groups_of, returns_of

import panoply as pp
from panoply.effects import inert
from panoply.errors import PanoplyError
from panoply.methods.objectives.rec import (
    asymre,
    gradient_gap,
    masked_likelihood,
    opmd,
    pairwise,
    rec,
    relative,
)
from panoply.slots.surrogate.ratios import clip
from panoply.slots.update.optimisers import sgd

QS = [0.3, 0.7, 1.0, 1.3, 3.5]


def seen(sign: float, **columns: Any) -> Any:
    rows = hand(**{"episode": list(range(5)), "logp": [-1.0] * 5, "advantage": [sign] * 5, **columns})
    return batch(rows, logp=[-1 + math.log(q) for q in QS])


@pytest.mark.parametrize(
    ("mask", "up", "down"),
    [
        ("none", [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]),
        ("one_side", [1, 1, 1, 0, 0], [0, 0, 1, 1, 1]),
        ("two_side", [0, 0, 1, 0, 0], [0, 0, 1, 0, 0]),
        ("ring", [1, 0, 1, 0, 0], [0, 0, 1, 0, 1]),
    ],
)
def test_masks_by_hand(mask: Any, up: list[int], down: list[int]) -> None:
    """Slopes in log π are A where a ratio of .3, .7, 1, 1.3, 3.5 learns: the mask is never differentiated."""
    for sign, wanted in ((2.0, up), (-2.0, down)):
        made = seen(sign)
        value, stats = masked_likelihood(mask=mask)(made)
        assert slopes(value, made.now["logp"]) == [sign * w for w in wanted]
        assert (stats["clip_high"] | stats["clip_low"]).tolist() == [not w for w in wanted]


def test_a_whole_episode_is_masked_by_its_mean() -> None:
    """Ratios 2 and ½ are 1 on average and learn; 1.3 twice does not; 1.15 twice does, by the mean and not the sum."""
    rows = hand(episode=[0, 0, 1, 1, 2, 2], logp=[-1.0] * 6, advantage=[1.0] * 6)
    made = batch(rows, logp=[-1 + math.log(q) for q in (2.0, 0.5, 1.3, 1.3, 1.15, 1.15)])
    value, _ = masked_likelihood(mask="episode", weigh="ratio")(made)
    assert slopes(value, made.now["logp"]) == pytest.approx([1.0, 1.0, 0.0, 0.0, 1.15, 1.15])


def test_weights() -> None:
    made = seen(2.0)
    assert slopes(masked_likelihood(mask="none", weigh="ratio")(made)[0], made.now["logp"]) == pytest.approx(
        [2 * q for q in QS]
    )
    value, _ = masked_likelihood(mask="none", weigh="advantage", temperature=4.0)(made)
    assert slopes(value, made.now["logp"]) == pytest.approx([2 * math.exp(0.5)] * 5)


@pytest.mark.parametrize("sign", [1.5, -1.5])
def test_one_side_with_the_ratio_has_the_gradient_of_the_clip(sign: float) -> None:
    made = seen(sign)
    value, _ = masked_likelihood(weigh="ratio")(made)
    assert slopes(value, made.now["logp"]) == pytest.approx(slopes(clip()(made)[0], made.now["logp"]))


def test_the_pairwise_loss_has_the_gradient_of_group_reinforce() -> None:
    """By hand for two answers: (1/4)·(1 − τ·(d₁ − d₂))²/(1 + τ)², whose slope at 0 is −τ/(2·(1 + τ)²) in d₁."""
    d = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    loss = pairwise(
        d, torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64), 1.0
    )
    assert loss.item() == pytest.approx(1 / 16)
    assert slopes(loss, d) == pytest.approx([-1 / 8, 1 / 8])
    assert max(gradient_gap(seed)["gap"] for seed in range(5)) < 1e-12


def groupwise(rewards: list[float], **settings: Any) -> list[float]:
    rows = hand(episode=list(range(len(rewards))), group=[0] * len(rewards), reward=rewards)
    found: list[float] = relative(**settings)(rows).tolist()
    return found


def test_credit() -> None:
    assert groupwise([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    assert groupwise([3.0]) == [3.0], "a group of one has the baseline 0"
    assert groupwise([0.1, 0.1, 0.1]) == groupwise([0.1, 0.1, 0.1], drop=True) == [0.0] * 3
    assert groupwise([1.0, 0.0], scale="std", epsilon=0.0) == pytest.approx([1.0, -1.0])


def test_dropping_balances_a_group_and_its_mean_is_of_those_kept() -> None:
    """Two right answers keep two wrong ones: the mean is ½ and not ¼, and the four others have no advantage."""
    found = groupwise([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], drop=True)
    assert sorted(found) == [-0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5]
    assert groupwise([1.0, 1.0, 0.0], drop=True) == groupwise([1.0, 1.0, 0.0]), (
        "no more negatives than positives"
    )
    drawn = set()
    for first in range(20):
        rows = hand(episode=[first + i for i in range(4)], group=[0] * 4, reward=[1.0, 0.0, 0.0, 0.0])
        drawn.add(tuple(relative(drop=True)(rows).tolist()))
    assert len(drawn) == 3, "each of the three is kept at times"


def slow(name: str) -> torch.Tensor:
    """The released equations a decision at a time: masked means over all tokens, A = r − mean."""
    made, table, loss = ragged(drift=0.6), Slow(), ZERO
    returns, inside = returns_of(made), 0
    for members in groups_of(made):
        mean = sum(returns[e] for e in members) / len(members) if len(members) > 1 else 0.0
        for e in members:
            a = returns[e] - mean
            for row in rows_of(made, episode=e):
                logp = table.logp(row["state"], row["action"])
                q = float((logp - row["logp"]).exp().detach())
                learns = name != "rec" or (q <= 1.2 and a >= 0) or (q >= 0.8 and a <= 0)
                inside += learns
                term = -a * logp * learns
                term = term + {"opmd": 0.1 * (logp - row["logp"]) ** 2, "asymre": -0.1 * logp}.get(name, 0.0)
                loss = loss + term / len(made)
    assert name != "rec" or 0 < inside < len(made)
    return table.gradient(loss)


@pytest.mark.parametrize("micro", [1, 5, 10**9])
@pytest.mark.parametrize("built", [rec, opmd, asymre], ids=lambda built: built.__name__)
def test_the_gradient_is_the_released_ones_however_the_batch_is_split(built: Any, micro: int) -> None:
    """AsymRE's penalty is on all answers, those of groups without any advantage included."""
    made = ragged(drift=0.6)
    method = built().but(update=sgd(lr=1.0, clip=0.0))
    rows = made.with_columns(advantage=method.credit(made))
    for each in (rows, shuffled(rows)):
        assert_same(gradient(method, each, micro_tokens=micro), slow(built.__name__))


def test_asymre_is_a_lower_baseline() -> None:
    made = ragged()
    method = asymre().but(update=sgd(lr=1.0, clip=0.0))
    credit = method.credit(made)
    plain = method.but(regularise=())
    assert_same(
        gradient(method, made.with_columns(advantage=credit)),
        gradient(plain, made.with_columns(advantage=credit + 0.1)),
    )


def test_what_cannot_be_and_what_has_no_effect() -> None:
    ring = {"surrogate.mask": "ring", "surrogate.far_low": 0.1}
    with pytest.raises(PanoplyError, match="the ring begins outside of the band"):
        pp.plan("rec", "chain", settings=ring)
    for setting in ("surrogate.low", "surrogate.temperature", "regularise.likelihood.weight"):
        with pytest.raises(PanoplyError, match="must be above 0"):
            pp.plan("asymre", "chain", settings={setting: 0})
    found = dict(inert(pp.plan("rec", "chain", settings={"sample.by": "behind:20"})))
    assert {"surrogate.far_low", "surrogate.temperature", "credit.epsilon"} <= set(found)
    assert "surrogate.low" not in found
    assert "surrogate.low" in dict(inert(pp.plan("rec", "chain")))
