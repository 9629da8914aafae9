"""CGPO: gates, choices and losses by hand."""

from __future__ import annotations

import math

import pytest
from kit import batch, hand, slopes

from panoply.experience import Experience
from panoply.methods.preferences.cgpo import (
    accepted_over_refused,
    batch_centred,
    beside_baseline,
    best_accepted,
    constrained,
    plain_return,
    preference_and_likelihood,
)
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.slots.loss.pairs import logistic
from panoply.worlds.text.strings import Strings

SIGMOID_1 = 1 / (1 + math.exp(-1))


def answers(**changes: list[float]) -> Experience:
    """Two groups of three one-token answers; the baseline is worth 1 everywhere."""
    columns = {
        "group": [0, 0, 0, 1, 1, 1],
        "signal:proxy": [2.0, 1.0, 3.0, 1.0, -5.0, -1.0],
        "signal:format": [1.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        "baseline:proxy": [1.0] * 6,
        "logp": [-1.0] * 6,
        "logp@reference": [-1.0, -6.0, -1.0, -1.0, -1.0, 3.0],
    }
    return hand(**{**columns, **changes})


def test_the_reward_is_calibrated_judged_and_near() -> None:
    """The second answer has κ = 5 of 10: half; refused ones earn nothing; a negative κ gives no more than 1."""
    found = constrained(limit=10.0)(answers())
    assert found.tolist() == pytest.approx([SIGMOID_1, 0.25, 0, 0, 0, 0])
    assert constrained(limit=10.0, judges=())(answers())[5] == pytest.approx(1 / (1 + math.exp(2)))


def test_refused_answers_stay_and_are_pushed_down() -> None:
    rows = answers(reward=[0.9, 0.3, 0.0, 0.0, 0.0, 0.0])
    assert batch_centred()(rows).tolist() == pytest.approx([0.7, 0.1, -0.2, -0.2, -0.2, -0.2])
    assert plain_return()(rows).tolist() == pytest.approx([0.9, 0.3, 0, 0, 0, 0])


def test_pairs_are_the_best_accepted_over_the_worst_refused() -> None:
    made = accepted_over_refused()(answers())
    assert made.pairs is not None
    assert made.pairs.tensor("chosen").tolist() == [0]  # the second group has no accepted answer and goes
    assert made.pairs.tensor("rejected").tolist() == [2]
    everything = accepted_over_refused()(answers(**{"signal:format": [1.0] * 6}))
    assert everything.pairs is not None
    assert everything.pairs.tensor("chosen").tolist() == [2, 3]
    assert everything.pairs.tensor("rejected").tolist() == [
        1,
        4,
    ]  # scores below zero are not taken for refusals


def test_the_best_accepted_answer_is_kept_with_its_calibrated_reward() -> None:
    made = best_accepted(limit=10.0)(answers())
    assert made["episode"].tolist() == [0]
    assert made["reward"].tolist() == pytest.approx([SIGMOID_1])
    far = best_accepted(limit=4.0)(answers(**{"signal:format": [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]}))
    assert len(far) == 0


def test_the_pair_loss_with_likelihood() -> None:
    rows = hand(pairs=[(0, 1)], episode=[0, 0, 1], **{"logp@reference": [-1.0, -1.0, -1.0]})
    seen = batch(rows, logp=[-0.5, -1.5, -2.0])
    value, _ = preference_and_likelihood(loss=logistic(beta=0.5), nll=2.0)(seen)
    assert value.tolist() == pytest.approx([2.0 * -1.0 - math.log(1 + math.exp(-0.5))], abs=1e-6)
    pair = 0.5 / (1 + math.exp(0.5))
    assert slopes(value, seen.now["logp"]) == pytest.approx([pair + 1.0, pair + 1.0, -pair])


def test_baselines_are_demonstrations_of_the_same_tasks() -> None:
    world = Strings()
    policy = TextPolicy.fresh(DecoderConfig(**world.default_model()), world.tokenizer, seed=0)
    made = beside_baseline(prompts=3, group=2)(Collector(world, policy, seed=0))
    by_group = made.by("group")
    assert bool(by_group.constant(made["baseline:proxy"]).all())
    assert float(made["baseline:true"].max()) > 0
