"""Lite PPO: whose mean, whose deviation, and one mean over all tokens."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import tiny
import torch
from kit import Slow, assert_same, gradient, hand, ragged, rows_of, shuffled, values_of
from papers import ZERO, groups_of, returns_of

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.loops.metrics import describe
from panoply.methods.objectives.lite_ppo import lite_ppo
from panoply.slots.credit.groups import group
from panoply.slots.select.filters import overlong_filter


def answers(rewards: list[float], groups: list[int]) -> Experience:
    """An answer of one token each."""
    return hand(group=groups, reward=rewards)


def test_golden_deviation_of_rewards_and_not_of_differences() -> None:
    """Rewards 1, 1, 1, 0 and 0, 0, 0, 0: std of all √(15/56), of what is left of them after centring √(3/28)."""
    found = lite_ppo().credit(answers([1, 1, 1, 0, 0, 0, 0, 0], [1] * 4 + [2] * 4)).tolist()
    spread = (15 / 56) ** 0.5
    assert found == pytest.approx([0.25 / spread] * 3 + [-0.75 / spread] + [0.0] * 4, rel=1e-5)
    assert found[4:] == [0.0] * 4, "a group without differences gets nothing, whatever ε is"


def test_one_slip_is_not_blown_up_by_its_group() -> None:
    """One of eight wrong beside a group half right: by their own deviations the slip weighs 2.5 times as much."""
    made = answers([1.0] * 7 + [0.0] + [1.0] * 4 + [0.0] * 4, [0] * 8 + [1] * 8)
    of_group, of_batch = (
        (lambda a: abs(a[7] / a[15]))(group(scale=s)(made).tolist()) for s in ("std", "batch_std")
    )
    assert of_batch == pytest.approx(0.875 / 0.5)
    assert of_group == pytest.approx((0.875 / 0.125**0.5) / (0.5 / (2 / 7) ** 0.5), rel=1e-3)
    assert of_group > of_batch * 1.5


@pytest.mark.parametrize("mean", ["group", "batch", None])
@pytest.mark.parametrize("std", ["group", "batch", None])
def test_all_nine_normalisers_are_rolls(mean: str | None, std: str | None) -> None:
    """Against the equations of ROLL's reward_norm on a frozen batch of three groups of four, ε = 1e-6."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 2.0], [3.0, 3.5, 3.0, 1.0], [0.0, 1.0, 1.0, 0.5]])
    subtracted = {"group": rewards.mean(1, keepdim=True), "batch": rewards.mean(), None: torch.tensor(0.0)}
    divides = {"group": rewards.std(1, keepdim=True), "batch": rewards.std(), None: torch.tensor(1 - 1e-6)}
    theirs = (rewards - subtracted[mean]) / (divides[std] + 1e-6)
    names = {"group": "mean", "batch": "batch_mean", None: "none"}
    scales = {"group": "std", "batch": "batch_std", None: "none"}
    ours = group(baseline=names[mean], scale=scales[std], epsilon=1e-6)(
        answers(rewards.flatten().tolist(), [0] * 4 + [1] * 4 + [2] * 4)
    )
    torch.testing.assert_close(ours.float(), theirs.flatten(), rtol=1e-5, atol=1e-6)


def slow_gradient(made: Experience) -> torch.Tensor:
    slow, loss, returns = Slow(), ZERO, returns_of(made)
    spread = statistics.stdev(returns.values())
    for members in groups_of(made):
        centre = statistics.fmean(returns[e] for e in members)
        for e in members:
            advantage = (returns[e] - centre) / (spread + 1e-6)
            for row in rows_of(made, episode=e):
                rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
                gain = torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)
                loss = loss - gain / len(made)
    return slow.gradient(loss)


def test_gradient_is_the_papers_in_any_order_and_split() -> None:
    method, made = lite_ppo(), ragged(drift=0.4)
    credited = made.with_columns(advantage=method.credit(made))
    expected = slow_gradient(made)
    assert_same(gradient(method, credited), expected)
    assert_same(gradient(method, shuffled(credited)), expected)
    assert_same(gradient(method, credited, micro_tokens=4), expected)


def test_overlong_answers_are_in_the_means_and_in_no_sum() -> None:
    """The denominator counts what is learned from: tokens of finished answers."""
    method, made = lite_ppo().but(select=(overlong_filter(),)), ragged(drift=0.0)
    cut = torch.isin(made["episode"], torch.tensor(values_of(made, "episode")[:2]))
    ends = torch.where(made.by("episode").is_last(), torch.where(cut, 2, 1), 0)
    kept = method.select[0](made.with_columns(end=ends))
    credited = kept.with_columns(advantage=method.credit(kept))
    assert credited["advantage"].tolist() == method.credit(made).tolist()
    slow, loss, learned = Slow(), ZERO, int((~cut).sum())
    for row in rows_of(credited):
        if row["train"]:
            rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
            loss = loss - rho * row["advantage"] / learned
    assert_same(gradient(method, credited), slow.gradient(loss))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PanoplyError, match="group of one episode is its own baseline"):
        pp.plan("lite-ppo", "chain", settings={"sample.group": 1})
    with pytest.raises(PanoplyError, match="batch of one episode is its own baseline"):
        pp.plan(
            "lite-ppo",
            "chain",
            settings={"sample.group": 1, "sample.prompts": 1, "credit.baseline": "batch_mean"},
        )
    pp.plan("lite-ppo", "chain", settings={"sample.group": 1, "credit.baseline": "batch_mean"})


def test_what_divides_is_logged() -> None:
    """Returns 3, 1 and 0 of episodes of unequal length: their deviation is √(7/3)."""
    made = hand(group=[0] * 4, episode=[0, 0, 1, 2], reward=[1.0, 2.0, 1.0, 0.0])
    assert describe(made)["reward_std"] == pytest.approx((7 / 3) ** 0.5)
    assert describe(hand(group=[0], reward=[1.0]))["reward_std"] == 0


def test_a_step_without_a_finished_answer_learns_nothing(tmp_path: Path) -> None:
    settings = {"sample.prompts": 2, "sample.group": 2, "run.held_out": 4, "sample.max_tokens": 1}
    tiny.bare(
        tmp_path / "run",
        "lite-ppo",
        model="fresh",
        steps=1,
        settings={**settings, "select": "overlong_filter"},
    )
    row = tiny.metrics(tmp_path / "run")[-1]
    assert row["truncated"] == 1
    assert row["loss"] == 0
