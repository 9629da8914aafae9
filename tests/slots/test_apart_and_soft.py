"""Losses that judge sides apart, and surrogates with a soft bound: values and slopes, worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit import batch, gradient, hand, on_policy, ragged, slopes

from panoply.batch import Batch
from panoply.errors import PanoplyError
from panoply.planning import make_plan
from panoply.slots.loss.pairs import discovered, reverse_kl, robust
from panoply.slots.loss.sides import anchored, binary, noise_contrast, squared_sides
from panoply.slots.loss.transport import sorted_gaps, sorted_sides
from panoply.slots.loss.unpaired import prospect
from panoply.slots.surrogate.sequences import sequence_clip
from panoply.slots.surrogate.soft import gamma_weight, soft_gate

LOG2, LOG3 = math.log(2), math.log(3)


def sides(chosen: float, rejected: float) -> Batch:
    """One pair of one-token answers with these log-ratios to the reference."""
    made = hand(episode=[1, 2], pairs=[(1, 2)], **{"logp@reference": [-1.0, -1.0]})
    return batch(made, logp=[chosen - 1, rejected - 1])


def prepared(seen: Batch, part: Any) -> Batch:
    """With what the part computes on the whole mini-batch."""
    with torch.no_grad():
        found = dict(part.info.prepare(seen, **part.settings()))
    return replace(seen, prepared={part.info.name: found})


@pytest.mark.parametrize(
    ("loss", "value", "slope"),
    [
        # σ(log 3) = ¾: (−.9·log ¾ + .1·log ¼)/.8, slope (−.9·¼ − .1·¾)/.8 = −.375
        (robust(beta=1.0, flips=0.1), (-0.9 * math.log(0.75) + 0.1 * math.log(0.25)) / 0.8, [-0.375, 0.375]),
        # KL([¾, ¼] ‖ [¾, ¼]) = 0 and without slope; see below for one that has
        (reverse_kl(beta=1.0, smoothing=0.25), 0.0, [0.0, 0.0]),
        # p(1 − p)·(log p/.5 − log (1 − p)/.5) = 3/16·log 3
        (
            reverse_kl(beta=1.0, smoothing=0.5),
            0.75 * math.log(1.5) + 0.25 * math.log(0.5),
            [3 / 16 * LOG3, -3 / 16 * LOG3],
        ),
        # w = σ(m) = ¾: ¼·(−log ¾) + ¾·⅓
        (discovered(beta=1.0, tau=1.0), -0.25 * math.log(0.75) + 0.25, None),
        # r = log 2 and −log 1.5: σ = ⅔ and ⅖
        (
            noise_contrast(beta=1.0),
            -math.log(2 / 3) - 0.5 * math.log(1 / 3) - 0.5 * math.log(3 / 5),
            [0.0, 0.2],
        ),
        (anchored(beta=1.0, chosen="up"), 1 / 3 + 2 / 5, [-2 / 9, 6 / 25]),
        (anchored(beta=1.0, chosen="down"), 2 / 3 + 1 / 4, [2 / 9 - 3 / 16, 3 / 16]),
        (
            squared_sides(beta=0.5),
            (LOG2 - 1) ** 2 + (1 - math.log(1.5)) ** 2,
            [2 * (LOG2 - 1), 2 * (1 - math.log(1.5))],
        ),
    ],
    ids=lambda x: str(x)[:40],
)
def test_golden(loss: Any, value: float, slope: list[float] | None) -> None:
    """ℓ_chosen = log 2 and ℓ_rejected = −log 1.5, whose difference is log 3."""
    seen = sides(LOG2, -math.log(1.5))
    found, stats = loss(seen)
    assert found.tolist() == pytest.approx([value])
    if slope is not None:
        assert slopes(found, seen.now["logp"]) == pytest.approx(slope, abs=1e-12)
    assert stats["accuracy"].tolist() == [1.0]


def test_the_discovered_loss_has_a_slope() -> None:
    """d/dm of (1 − w)·(−log σ(m)) + w·e^{−m}: w′·(e^{−m} + log σ(m)) − (1 − w)² − w·e^{−m} at m = log 3, τ = 1."""
    seen = sides(LOG2, -math.log(1.5))
    found, _ = discovered(beta=1.0, tau=1.0)(seen)
    slope = 3 / 16 * (1 / 3 + math.log(0.75)) - 1 / 16 - 1 / 4
    assert slopes(found, seen.now["logp"]) == pytest.approx([slope, -slope])


def test_noise_contrast_has_its_optimum_above_the_reference() -> None:
    for chosen, sign in ((LOG2 - 0.1, -1), (LOG2 + 0.1, 1)):
        seen = sides(chosen, 0.0)
        found, _ = noise_contrast(beta=1.0)(seen)
        assert math.copysign(1, slopes(found, seen.now["logp"])[0]) == sign


@pytest.mark.parametrize(("shift", "delta"), [(True, (LOG2 - math.log(1.5)) / 2), (False, 0.0)])
def test_binary(shift: bool, delta: float) -> None:
    loss = binary(beta=1.0, shift=shift)
    seen = prepared(sides(LOG2, -math.log(1.5)), loss)
    found, _ = loss(seen)
    won, lost = 1 / (1 + math.exp(delta - LOG2)), 1 / (1 + math.exp(-delta - math.log(1.5)))
    assert found.tolist() == pytest.approx([-math.log(won) - math.log(lost)])
    assert slopes(found, seen.now["logp"]) == pytest.approx([won - 1, 1 - lost])


def two_pairs() -> Batch:
    """ℓ: chosen 1 and 3, rejected 2 and −1. Gaps of π: 2 and 0; of the reference: 3 and −4."""
    made = hand(episode=[1, 2, 3, 4], pairs=[(1, 2), (3, 4)], **{"logp@reference": [-2.0, -5.0, -5.0, -1.0]})
    return batch(made, logp=[-1.0, -3.0, -2.0, -2.0])


def test_sorted_gaps() -> None:
    """Gaps 2 and 0 against the reference's 3 and −4, both in order: 2 − 3 and 0 + 4, as pair by pair."""
    loss = sorted_gaps(beta=1.0)
    seen = prepared(two_pairs(), loss)
    found, _ = loss(seen)
    assert found.tolist() == pytest.approx([math.log(1 + math.e), math.log(1 + math.exp(-4))])
    swapped = prepared(batch(two_pairs().experience, logp=[-3.0, -1.0, -2.0, -2.0]), loss)
    found, _ = loss(swapped)
    margins = [-2.0 + 4.0, 0.0 - 3.0]
    assert found.tolist() == pytest.approx([math.log(1 + math.exp(-m)) for m in margins])
    first, second = (1 / (1 + math.exp(m)) for m in margins)
    assert slopes(found, swapped.now["logp"]) == pytest.approx([-first, first, -second, second])


def test_sorted_sides() -> None:
    """Chosen 1 faces rejected −1, chosen 3 faces rejected 2: margins 2 and 1, whoever was paired with whom."""
    loss = sorted_sides(beta=1.0, smoothing=0.1)
    seen = prepared(two_pairs(), loss)
    found, _ = loss(seen)

    def smoothed(m: float) -> float:
        return 0.9 * math.log(1 + math.exp(-m)) + 0.1 * math.log(1 + math.exp(m))

    assert found.tolist() == pytest.approx([smoothed(2.0), smoothed(1.0)])
    two, one = (-0.9 / (1 + math.exp(m)) + 0.1 / (1 + math.exp(-m)) for m in (2.0, 1.0))
    assert slopes(found, seen.now["logp"]) == pytest.approx([two, -one, one, -two])


def test_a_reference_point_of_zero() -> None:
    made = hand(episode=[0, 1, 2], label=[1, -1, 0], **{"logp@reference": [-1.0, -1.0, -5.0]})
    seen = batch(made, logp=[-1 + LOG2, -1 + LOG2, -1.0])
    found, _ = prospect(beta=1.0, point="zero")(prepared(seen, prospect(beta=1.0, point="zero")))
    assert found.tolist() == pytest.approx([1 / 3 * 1.5, 2 / 3 * 1.5, 0.0])
    found, _ = prospect(beta=1.0)(prepared(seen, prospect(beta=1.0)))
    assert found.tolist() != pytest.approx([1 / 3 * 1.5, 2 / 3 * 1.5, 0.0])


def test_soft_gate() -> None:
    """ρ = 1 and A = 3: 4/1·½·3; ρ = 2 and A = −1: −4/2·σ(2). Slopes are ρ·A·4·σ·(1 − σ)."""
    made = hand(advantage=[3.0, -1.0], logp=[-1.0, -1.0])
    seen = batch(made, logp=[-1.0, -1.0 + LOG2])
    found, _ = soft_gate(positive=1.0, negative=2.0)(seen)
    gate = 1 / (1 + math.exp(-2))
    assert found.tolist() == pytest.approx([6.0, -2 * gate])
    assert slopes(found, seen.now["logp"]) == pytest.approx([3.0, -2 * 4 * gate * (1 - gate)])


def test_gamma_weight() -> None:
    """Episode 1: w = 2·2 = 4, A = 1: 4^2·e^{−9}. Episode 2: w = ½, A = −1: (½)^3·e^{1}. The weight has no slope."""
    made = hand(episode=[1, 1, 2], advantage=[1.0, 1.0, -1.0], logp=[-3.0, -3.0, -3.0])
    seen = batch(made, logp=[-3 + LOG2, -3 + LOG2, -3 - LOG2])
    found, stats = gamma_weight()(seen)
    first, second = 16 * math.exp(-9), math.e / 8
    assert stats["episode_weight"].tolist() == pytest.approx([first, first, second])
    assert slopes(found, seen.now["logp"]) == pytest.approx([first, first, -second])
    assert found.tolist() == pytest.approx([first * (-3 + LOG2), first * (-3 + LOG2), second * (3 + LOG2)])


def test_gamma_weight_at_the_ends() -> None:
    """An episode that is now impossible or certain has a weight of nothing, not of nonsense."""
    made = hand(episode=[1, 2], advantage=[1.0, 1.0], logp=[-100.0, 0.0])
    found, stats = gamma_weight()(batch(made, logp=[0.0, -100.0]))
    assert found.isfinite().all()
    assert stats["episode_weight"].tolist() == pytest.approx([0.0, 20.0855 * 1e-16], abs=1e-14)


def test_episodes_are_never_cut() -> None:
    assert gamma_weight().units == {"decision", "episode"}
    made = ragged()
    whole = gradient(on_policy(surrogate=gamma_weight()), made)
    assert torch.allclose(gradient(on_policy(surrogate=gamma_weight()), made, micro_tokens=1), whole)


def test_lengths_weigh() -> None:
    """LUSPO: an episode's value, and its slope, times its length."""
    made = hand(episode=[1, 1, 2], advantage=[1.0, 1.0, 3.0], logp=[-2.0, -2.0, -2.0])
    for form in ("episode", "decision"):
        seen = batch(made, logp=[-2.0, -2.0, -2.0])
        found, _ = sequence_clip(lengths="weigh", advantage=form)(seen)
        assert found.tolist() == pytest.approx([2.0, 3.0])
        assert slopes(found, seen.now["logp"]) == pytest.approx([1.0, 1.0, 3.0])
    assert sequence_clip(lengths="weigh").equation().startswith("|y|·min")


@pytest.mark.parametrize(
    ("method", "setting", "value"),
    [
        ("robust-dpo", "losses.robust.flips", 0.5),
        ("exo", "losses.reverse_kl.smoothing", 0.0),
        ("nca", "losses.noise_contrast.beta", 0.0),
        ("sapo", "surrogate.negative", 0.0),
        ("vespo", "surrogate.k_positive", -1.0),
    ],
)
def test_what_cannot_be(method: str, setting: str, value: float) -> None:
    with pytest.raises(PanoplyError, match=setting.rpartition(".")[2]):
        make_plan(method, settings={setting: value})
