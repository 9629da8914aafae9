"""IGPO: gains and credit worked by hand, the gradient from the paper's equations, and where beliefs come from."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
import torch
from kit import Slow, assert_same, gradient, hand, ragged, rows_of, shuffled, values_of

import panoply as pp
from panoply.compose import resolve
from panoply.experience import Experience
from panoply.methods.agents.igpo import igpo, information_gain, turn_returns
from panoply.methods.base.grpo import grpo

# Episode 1: three turns (of 2, 1 and 1 decisions), beliefs ¼ → ½ → 1, success. Episode 2: two turns, ¼ → ⅛, failure.
COLUMNS: dict[str, Any] = {
    "group": [5] * 6,
    "episode": [1, 1, 1, 1, 2, 2],
    "turn": [0, 0, 1, 2, 0, 1],
    "position": [3, 4, 3, 3, 3, 3],
    "answer_likelihood": [0.25, 0.25, 0.5, 1.0, 0.25, 0.125],
    "signal:success": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
}
GAINS = [0.0, 0.25, 0.5, 1.0, -0.125, 0.0]


def searches(**columns: Any) -> Experience:
    return hand(**{**COLUMNS, **columns})


def test_a_turn_earns_what_it_adds_to_the_belief_and_the_last_one_the_outcome() -> None:
    assert information_gain()(searches()).tolist() == GAINS


def test_gains_in_logarithms() -> None:
    found = information_gain(form="log")(searches()).tolist()
    assert found == pytest.approx([0.0, math.log(2), math.log(2), 1.0, -math.log(2), 0.0])


def test_a_single_turn_earns_the_outcome_alone() -> None:
    one = hand(
        group=[1], episode=[1], turn=[0], position=[1], answer_likelihood=[0.3], **{"signal:success": [1.0]}
    )
    assert information_gain()(one).tolist() == [1.0]


def credit(reward: list[float] = GAINS, **settings: Any) -> list[float]:
    found: list[float] = turn_returns(**{"epsilon": 0.0, **settings})(searches(reward=reward)).tolist()
    return found


def test_turns_are_standardised_together_and_summed() -> None:
    turns = [0.25, 0.5, 1.0, -0.125, 0.0]
    mean, spread = statistics.fmean(turns), statistics.stdev(turns)
    a, b, c, d, e = ((x - mean) / spread for x in turns)
    assert credit() == pytest.approx([a + b + c, a + b + c, b + c, c, d + e, e])
    half = [a + b / 2 + c / 4, a + b / 2 + c / 4, b + c / 2, c, d + e / 2, e]
    assert credit(gamma=0.5) == pytest.approx(half)


def test_gains_and_outcomes_may_be_standardised_apart() -> None:
    gains, outcomes = [0.25, 0.5, -0.125], [1.0, 0.0]
    a, b, d = ((x - statistics.fmean(gains)) / statistics.stdev(gains) for x in gains)
    c, e = ((x - statistics.fmean(outcomes)) / statistics.stdev(outcomes) for x in outcomes)
    found = credit(normalise="separate")
    assert found == pytest.approx([a + b + c, a + b + c, b + c, c, d + e, e])


def test_the_released_code_compares_places() -> None:
    # Returns from each decision on: 1.75 1.75 1.5 1 and −.125 0; the third and fourth places have one episode only.
    found = credit(normalise="position")
    assert found == pytest.approx([0.9375, 0.875, 0.0, 0.0, -0.9375, -0.875])


def test_equal_rewards_give_exactly_nothing() -> None:
    for normalise in ("joint", "separate", "position"):
        assert credit([0.0] * 6, normalise=normalise) == [0.0] * 6


@pytest.mark.parametrize("normalise", ["joint", "separate", "position"])
def test_row_order_does_not_matter(normalise: Any) -> None:
    made = searches(key=list(range(6)))
    mixed = shuffled(made)
    order = mixed["key"].argsort()
    assert information_gain()(mixed)[order].tolist() == GAINS
    whole = made.with_columns(reward=information_gain()(made))
    part = turn_returns(normalise=normalise)
    again = part(mixed.with_columns(reward=information_gain()(mixed)))[order]
    assert torch.allclose(again, part(whole))


def test_gradient_is_the_papers() -> None:
    """Card 103: gains, joint z-scores, discounted sums, and GRPO's loss, one token at a time."""
    made, slow, dice = ragged(drift=0.4), Slow(), random.Random(0)
    rows = rows_of(made)
    belief = {key: dice.random() for key in sorted({(r["episode"], r["turn"]) for r in rows})}
    right = {e: float(e % 2) for e in values_of(made, "episode")}
    last = {e: max(t for f, t in belief if f == e) for e in right}
    of_group = {r["episode"]: r["group"] for r in rows}
    made = made.with_columns(**{
        "position": torch.arange(1, len(made) + 1),
        "answer_likelihood": torch.tensor([belief[r["episode"], r["turn"]] for r in rows]).double(),
        "signal:success": torch.tensor([right[r["episode"]] for r in rows]).double() * made.by("episode").is_last(),
    })  # fmt: skip
    earned = {(e, t): right[e] if t == last[e] else belief[e, t + 1] - p for (e, t), p in belief.items()}
    z = {}
    for (e, t), r in earned.items():
        peers = [x for (f, _), x in earned.items() if of_group[f] == of_group[e]]
        z[e, t] = (
            (r - statistics.fmean(peers)) / (statistics.stdev(peers) + 1e-6) if len(set(peers)) > 1 else 0.0
        )
    loss = torch.zeros((), dtype=torch.float64)
    for e in right:
        mine = rows_of(made, episode=e)
        for row in mine:
            advantage = sum(x for (f, k), x in z.items() if f == e and k >= row["turn"])
            logp = slow.logp(row["state"], row["action"])
            rho, away = (logp - row["logp"]).exp(), row["logp@reference"] - logp
            gain = torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)
            loss = loss - (gain - 0.001 * (away.exp() - away - 1)) / len(mine) / len(right)
    method = igpo()
    made = made.with_columns(reward=method.reward(made))
    made = made.with_columns(advantage=method.credit(made))
    assert_same(gradient(method, made), slow.gradient(loss), rel=1e-5)


def test_the_diff_is_reward_and_credit() -> None:
    tiny = [resolve(name, preset="tiny").method for name in ("igpo", "grpo")]
    assert {path.split(".")[0] for path, *_ in tiny[0].diff(tiny[1])} == {"reward", "credit"}
    assert {path.split(".")[0] for path, *_ in igpo().diff(grpo())} == {
        "reward",
        "credit",
        "sample",
        "regularise",
    }


def test_a_world_without_a_final_answer_is_refused() -> None:
    with pytest.raises(pp.PanoplyError, match="needs a world with 'conclusion'"):
        pp.plan("igpo", "keydoor")
