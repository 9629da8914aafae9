"""Pairwise PPO: both bounds by hand and from their equations, offsets that change nothing, and RLOO on policy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kit import Slow, assert_same, batch, gradient, hand, on_policy, ragged, rows_of, shuffled, slopes
from papers import ZERO, groups_of, returns_of, total
from torch import Tensor

import panoply as pp
from panoply.batch import Batch
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.preferences.p3o import apart, p3o, p3o_joint, pairwise
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import sequence_sum
from panoply.slots.surrogate.ratios import log_likelihood
from panoply.slots.update.optimisers import sgd


def two(rewards: tuple[float, float], moved: tuple[float, float]) -> Batch:
    """Two answers of one token to a prompt, whose log-ratios are `moved`."""
    made = hand(episode=[0, 1], group=[0, 0], logp=[-1.0, -2.0], reward=[*map(float, rewards)])
    return batch(made, logp=[-1.0 + moved[0], -2.0 + moved[1]])


def slope(rewards: tuple[float, float], moved: tuple[float, float], **settings: Any) -> list[float]:
    made = two(rewards, moved)
    return slopes(pairwise(beta=0.0, **settings)(made)[0], made.now["logp"])


def test_by_hand() -> None:
    """Δ = 1. Unmoved: ±½. Moved: each side has both ratios in it, until its own bound acts (V1), or that of the gap."""
    assert slope((1.0, 0.0), (0.0, 0.0)) == pytest.approx([0.5, -0.5])
    a, b = math.exp(0.1), math.exp(-0.05)
    assert slope((1.0, 0.0), (0.1, -0.05)) == pytest.approx([a * b / 2, -a * b / 2])
    assert slope((1.0, 0.0), (0.3, 0.1)) == pytest.approx([0.0, -math.exp(0.4) / 2]), "e^0.3 is above 1.2"
    assert slope((1.0, 0.0), (-0.3, 0.1)) == pytest.approx([math.exp(-0.2) / 2, -math.exp(-0.2) / 2])
    joint = slope((1.0, 0.0), (0.3, 0.15), joint=True)
    assert joint == pytest.approx([math.exp(0.45) / 2, -math.exp(0.45) / 2]), "0.15 apart: not cut"
    assert slope((1.0, 0.0), (0.3, 0.05), joint=True) == [0.0, 0.0]
    assert slope((0.0, 1.0), (0.3, 0.05), joint=True) == pytest.approx(
        [-math.exp(0.35) / 2, math.exp(0.35) / 2]
    )


def clipped(x: Tensor, low: float, high: float) -> Tensor:
    return x.clamp(low, high)


def slow(made: Experience, beta: float, joint: bool, epsilon: float = 0.2) -> Tensor:
    """The mean over groups of the mean over pairs, in plain loops."""
    table, value, groups, earned = Slow(), ZERO, groups_of(made), returns_of(made)
    for members in groups:
        pairs = [(i, j) for i in members for j in members if i < j]
        for i, j in pairs:
            s = {e: total(made, table, e, "logp") for e in (i, j)}
            r = {
                e: earned[e] - beta * float(total(made, table, e, "logp@reference").detach()) for e in (i, j)
            }
            if joint:
                A = (r[i] - r[j]) * float((s[i] + s[j]).detach().exp())
                z = s[i] - s[j]
                found = torch.minimum(A * z, A * clipped(z, -epsilon, epsilon))
            else:
                found = ZERO
                for one, other in ((i, j), (j, i)):
                    A = (r[one] - r[other]) * float(s[other].detach().exp())
                    ratio = s[one].exp()
                    bounded = A * clipped(ratio, 1 - epsilon, 1 + epsilon)
                    found = found + torch.minimum(A * ratio, bounded)
            value = value + found / (2 * len(pairs) * len(groups))
    return table.gradient(-value)


@pytest.mark.parametrize("joint", [False, True])
def test_the_gradient_is_the_equation_s(joint: bool) -> None:
    made = ragged(drift=0.3)
    method = p3o().but(surrogate=pairwise(beta=0.3, joint=joint), update=sgd(lr=1.0, clip=0.0))
    expected = slow(made, 0.3, joint)
    for micro in (10**9, 1):
        for rows in (made, shuffled(made)):
            assert_same(gradient(method, rows, micro_tokens=micro), expected)


@pytest.mark.parametrize("method", [p3o(), p3o_joint()])
def test_what_a_prompt_adds_to_all_rewards_changes_nothing(method: Any) -> None:
    made = ragged(drift=0.3)
    last = made.by("episode").is_last()
    offsets = torch.tensor(
        [{10: 7.0, 11: -31.0, 12: 0.5, 13: 12.0}[g] for g in made["group"].tolist()]
    ).double()
    shifted = made.with_columns(reward=made["reward"] + offsets * last)
    assert_same(gradient(method, shifted), gradient(method, made), rel=1e-12)


@pytest.mark.parametrize("name", ["p3o", "p3o-joint"])
def test_weights_after_training_are_the_same_with_and_without_offsets(name: str) -> None:
    found = apart(1001, name, steps=2)
    assert found["apart"] <= 1e-6
    assert found["moved"] > 1e-3


@pytest.mark.parametrize("joint", [False, True])
def test_on_policy_it_is_rloo_with_two_answers(joint: bool) -> None:
    """Of r − β·log π/π_ref; a mean over pairs of a sum of two halves is a mean over answers."""
    made = ragged(lengths=((2, 1), (3, 2), (1, 4)), drift=0.0)
    away = torch.linspace(-0.3, 0.3, len(made)).double()
    made = made.with_columns(**{"logp@reference": made["logp"] - away})
    shaped = made.with_columns(reward=made["reward"] - 0.3 * away)
    credit = group(baseline="leave_one_out", scale="none")
    shaped = shaped.with_columns(advantage=credit(shaped).double())
    rloo = on_policy(surrogate=log_likelihood(), reduce=sequence_sum())
    found = gradient(on_policy(surrogate=pairwise(beta=0.3, joint=joint)), made)
    assert_same(found, gradient(rloo, shaped), rel=1e-5)


def test_a_prompt_with_one_answer_teaches_nothing() -> None:
    made = ragged(lengths=((2,), (1, 3)))
    rows = [r["group"] for r in rows_of(made)]
    assert sorted(set(rows)) == [10, 11]
    moved = made["logp"] + torch.linspace(-0.1, 0.1, len(made)).double()
    value, _ = pairwise(beta=1.0, joint=True)(Batch(made, {"logp": moved}))
    assert value.tolist()[0] == 0.0
    assert value.tolist()[1] != 0.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sample.group": 1}, "an answer needs another one to the same prompt|needs another episode"),
        ({"surrogate.epsilon": 0.0}, "above 0"),
        ({"update.minibatches": 1, "surrogate.epsilon": 0.1}, "the ratio stays at 1"),
        ({"surrogate.beta": 0.0, "surrogate.to": "old"}, "the KL has no weight"),
    ],
)
def test_refusals(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan("p3o", "chain", settings=settings)
