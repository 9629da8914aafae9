"""BAPO: the search by hand, over whole mini-batches, and as its released code does it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Slow, Tabular, assert_same, batch, gradient, hand, learner, ragged, rows_of, shuffled, slopes
from papers import ZERO

import panoply as pp
from panoply.batch import Batch
from panoply.effects import inert
from panoply.errors import PanoplyError
from panoply.methods.objectives.bapo import _places, balanced_clip, bapo
from panoply.progress import Progress
from panoply.run import Run
from panoply.slots.surrogate.ratios import clip
from panoply.slots.update.optimisers import sgd


def ratios(*values: float) -> list[float]:
    return [-1 + math.log(v) for v in values]


def seen(advantage: list[float], q: list[float]) -> Batch:
    rows = len(q)
    return batch(hand(episode=list(range(rows)), logp=[-1.0] * rows, advantage=advantage), logp=ratios(*q))


def found(part: Any, made: Batch) -> dict[str, float]:
    assert part.info.prepare is not None
    bounds: dict[str, float] = part.info.prepare(made, **part.settings())
    return bounds


def applied(part: Any, made: Batch) -> tuple[torch.Tensor, Any]:
    value, stats = part(Batch(made.experience, made.now, {"balanced_clip": found(part, made)}))
    return value, stats


WIDE = {"low": (0.5, 0.9), "high": (1.2, 2.0), "step": 0.4}


def test_the_search_by_hand() -> None:
    """q = 2, A = 1 against q = .6 and 1, A = −1. S⁺ is 1.2, 1.6, 2.0; S⁻ is 1.6, then 1.9."""
    made = seen([1.0, -1.0, -1.0], [2.0, 0.6, 1.0])
    for target, bounds, share in (
        (0.4, (0.5, 1.2), 1.2 / 2.8),
        (0.5, (0.5, 1.6), 0.5),
        (0.55, (0.5, 2.0), 2 / 3.6),
    ):
        got = found(balanced_clip(target=target, **WIDE), made)
        assert (got["low"], got["high"]) == pytest.approx(bounds)
        assert got["share"] == pytest.approx(share)


def test_a_higher_lower_bound_makes_the_negative_sum_larger_and_is_tried_all_the_same() -> None:
    """Σ max(q, l)·|A| grows with l: a target that h cannot meet, l cannot either, and both end at their last place."""
    made = seen([1.0, -3.0], [1.0, 0.6])
    got = found(balanced_clip(target=0.9, **WIDE), made)
    assert (got["low"], got["high"]) == pytest.approx((0.9, 2.0))
    assert got["share"] == pytest.approx(1 / (1 + 2.7))


def test_which_bound_moves_first() -> None:
    """Low first, as the released code: l goes to its end before h moves."""
    made = seen([1.0, -1.0, -1.0], [2.0, 0.6, 1.0])
    got = found(balanced_clip(target=0.5, first="low", **WIDE), made)
    assert (got["low"], got["high"]) == pytest.approx((0.9, 2.0)), "1.6/3.5 is too little, 2/3.9 enough"
    assert got["share"] == pytest.approx(2 / 3.9)


def test_the_share_of_the_released_code() -> None:
    """S⁺/S⁻ ≥ ½ is a third of all: 1.2/1.6 meets it where 1.2/2.8 misses a half."""
    made = seen([1.0, -1.0, -1.0], [2.0, 0.6, 1.0])
    got = found(balanced_clip(share="over_negative", **WIDE), made)
    assert (got["low"], got["high"]) == (0.5, 1.2)
    assert got["share"] == pytest.approx(1.2 / 2.8), "what is shown is the share of all either way"


def test_bounds_are_ratios_themselves() -> None:
    """h = 1.2 lets go of a ratio of 1.3 and l = .5 of one of .4, not those beyond 2.2 and −.5."""
    part = balanced_clip(low=(0.5, 0.5), high=(1.2, 1.2))
    made = seen([1.0, 1.0, -1.0, -1.0], [1.3, 1.1, 0.4, 0.6])
    value, stats = applied(part, made)
    assert value.tolist() == pytest.approx([1.2, 1.1, -0.5, -0.6])
    assert slopes(value, made.now["logp"]) == pytest.approx([0.0, 1.1, 0.0, -0.6])
    assert stats["clip_high"].tolist() == [True, False, False, False]
    assert stats["clip_low"].tolist() == [False, False, True, False]


def test_the_dual_floor() -> None:
    made = seen([-2.0, -2.0], [5.0, 2.5])
    value, stats = applied(balanced_clip(), made)
    assert value.tolist() == pytest.approx([-6.0, -5.0])
    assert stats["clip_dual"].tolist() == [True, False]
    assert applied(balanced_clip(dual=None), made)[0].tolist() == pytest.approx([-10.0, -5.0])


def test_nothing_negative_is_a_share_of_one() -> None:
    for advantage in ([1.0, 2.0], [0.0, 0.0]):
        got = found(balanced_clip(), seen(advantage, [2.0, 0.3]))
        assert (got["low"], got["high"], got["share"]) == (0.6, 1.2, 1.0)


def test_ratios_at_one_search_nothing() -> None:
    """On-policy no bound reaches a ratio, so the bounds stay where they begin."""
    got = found(balanced_clip(), seen([1.0, -9.0], [1.0, 1.0 + 1e-6]))
    assert (got["low"], got["high"]) == (0.6, 1.2)
    assert found(balanced_clip(), seen([1.0, -9.0], [1.0, 1.01]))["high"] == 3.0


def test_on_policy_it_is_the_plain_clip() -> None:
    made = seen([1.0, -3.0, 0.5], [1.0, 1.0, 1.0])
    value, _ = applied(balanced_clip(), made)
    assert slopes(value, made.now["logp"]) == slopes(clip()(made)[0], made.now["logp"])


def test_places_end_where_they_are_said_to() -> None:
    assert _places((0.6, 0.9), 0.2) == pytest.approx([0.6, 0.8, 0.9])
    assert _places((1.2, 1.4), 0.1) == pytest.approx([1.2, 1.3, 1.4])
    assert _places((0.8, 0.8), 0.1) == [0.8]


def released(q: list[float], advantage: list[float], target: float) -> tuple[float, float]:
    """The search of recipe/bapo/policy_loss.py with its script's numbers, by its equations: low, then high."""
    low, high = 0.8, 1.2

    def ratio() -> float:
        plus = sum(min(r, high) * a for r, a in zip(q, advantage, strict=True) if a > 0)
        minus = sum(max(r, low) * -a for r, a in zip(q, advantage, strict=True) if a < 0)
        return math.inf if minus <= 0 else plus / (minus + 1e-8)

    while ratio() < target and low < 0.95:
        low = min(low + 0.05, 0.95)
    while ratio() < target and high < 2.0:
        high = min(high + 0.1, 2.0)
    return low, high


CODE: dict[str, Any] = {
    "share": "over_negative",
    "first": "low",
    "low": (0.8, 0.95),
    "high": (1.2, 2.0),
    "step": 0.1,
}


@pytest.mark.parametrize("target", [0.3, 0.5, 0.55, 0.6, 0.64, 1.0])
def test_parity_with_the_released_search(target: float) -> None:
    made = ragged(drift=1.5)
    now = Tabular().score(made)["logp"].detach()
    q, advantage = (now - made["logp"]).exp().tolist(), made["advantage"].tolist()
    got = found(balanced_clip(target=target, **CODE), Batch(made, {"logp": now}))
    assert (got["low"], got["high"]) == pytest.approx(released(q, advantage, target), abs=1e-9)


def slow(made: Any, low: float, high: float) -> torch.Tensor:
    """−mean over tokens of min(qA, clip(q, l, h)·A), at least 3A where A < 0, a decision at a time."""
    table, loss = Slow(), ZERO
    for row in rows_of(made):
        q, a = (table.logp(row["state"], row["action"]) - row["logp"]).exp(), row["advantage"]
        value = torch.minimum(q * a, q.clamp(low, high) * a)
        loss = loss - (torch.maximum(value, torch.tensor(3.0 * a)) if a < 0 else value) / len(made)
    return table.gradient(loss)


@pytest.mark.parametrize("micro", [1, 4, 10**9])
def test_bounds_are_of_the_whole_mini_batch_however_it_is_split(micro: int) -> None:
    """Pieces of their own would choose other bounds; the gradient is the equation's, in any order."""
    made = ragged(drift=1.5)
    now = Tabular().score(made)["logp"].detach()
    part = balanced_clip(target=0.45)
    bounds = found(part, Batch(made, {"logp": now}))
    assert 1.2 < bounds["high"] < 3.0, "the search stops inside of its range"
    pieces = {
        found(part, Batch(each, {"logp": Tabular().score(each)["logp"].detach()}))["high"]
        for each in (made.take(made["group"] == g) for g in (10, 11, 12, 13))
    }
    assert len(pieces) > 1, "and pieces would not agree"
    method = bapo().but(surrogate=part, update=sgd(lr=1.0, clip=0.0))
    expected = slow(made, bounds["low"], bounds["high"])
    for each in (made, shuffled(made)):
        assert_same(gradient(method, each, micro_tokens=micro), expected)


def test_what_does_not_learn_has_no_say() -> None:
    made = ragged(drift=1.5)
    train = made["group"] != 10
    method = bapo().but(update=sgd(lr=1.0, clip=0.0))
    marked = learner(Tabular(), method).gradient(made.with_columns(train=train))["logits"]
    assert_same(marked, learner(Tabular(), method).gradient(made.take(train))["logits"])


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("surrogate.low=0.9,0.6", "that is not smaller"),
        ("surrogate.low=0.9,1.1", "at most 1"),
        ("surrogate.high=0.2,0.4", "it is the ratio itself"),
        ("surrogate.high=1.2,1.4,2", "takes a list, not"),
        ("surrogate.target=1", "a share of all is below 1"),
        ("surrogate.target=0", "must be above 0"),
        ("surrogate.dual=1", "must be above 1"),
        ("surrogate.step=0", "must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(setting: str, why: str) -> None:
    path, _, word = setting.partition("=")
    with pytest.raises(PanoplyError, match=why):
        pp.plan("bapo", "chain", settings={path: word})


def test_what_has_no_effect_is_said() -> None:
    alone = {"update.epochs": 1, "update.minibatches": 1}
    assert "surrogate.target" in dict(inert(pp.plan("bapo", "chain", settings=alone)))
    stale = dict(inert(pp.plan("bapo", "chain", settings={**alone, "sample.by": "behind:10"})))
    assert "surrogate.target" not in stale
    fixed = dict(inert(pp.plan("bapo", "chain", settings={"surrogate.low": (0.8, 0.8)})))
    assert "surrogate.first" in fixed
    assert "surrogate.step" not in fixed
    assert "surrogate.step" in dict(inert(pp.plan("bapo", "chain", settings={"surrogate.high": (1.2, 1.2)})))


def test_a_stale_run_moves_its_bounds(tmp_path: Path) -> None:
    """Rows are of who acted, the start; the ratio leaves 1 after the first step, and the bounds begin to move."""
    settings = {
        "sample.by": "behind:2",
        "sample.prompts": 4,
        "sample.group": 4,
        "update.lr": 1e-2,
        "update.epochs": 1,
        "update.minibatches": 1,
        "surrogate.target": 0.99,
        "run.episodes_every": 0,
    }
    pp.train(
        "bapo",
        "chain",
        run=tmp_path / "run",
        settings=settings,
        steps=3,
        threads=1,
        held_out=4,
        progress=Progress(),
    )
    rows = [r for r in Run.open(tmp_path / "run").metrics() if "bound_high" in r]
    assert rows[0]["bound_high"] == pytest.approx(1.2)
    assert max(r["bound_high"] for r in rows) == pytest.approx(3.0)
