"""The unlikeliness reward: who is ranked, by what, and what is dropped."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import Slow, Tabular, assert_same, gradient, hand, learner, on_policy, ragged, rows_of, shuffled
from papers import ZERO, groups_of

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.objectives.unlikeliness import unlikeliness, unlikely
from panoply.slots.reward.signals import signal
from panoply.slots.sample.dynamic import varied_groups_of
from panoply.slots.update.optimisers import adam


def answers(logp: list[float], right: list[float], **more: Any) -> Experience:
    """A group of answers of one token each."""
    return hand(**{"group": [0] * len(logp), "logp": logp, "signal:success": right, **more})


def test_golden() -> None:
    """Ranks 3, 0, 1, 2 of four: ¾, 0, ¼, ½ of a quarter less, wrong ones are ranked and stay at 0."""
    found = unlikely(beta=0.25)(answers([-1.0, -4.0, -3.0, -2.0], [1.0, 1.0, 0.0, 1.0]))
    assert found.tolist() == pytest.approx([0.8125, 1.0, 0.0, 0.875])


def test_rank_is_by_the_mean_of_an_answer_and_not_its_sum() -> None:
    """Three tokens of −1 are likelier than one of −2."""
    made = hand(
        **{
            "group": [0] * 4,
            "episode": [0, 0, 0, 1],
            "logp": [-1.0, -1.0, -1.0, -2.0],
            "signal:success": [0.0, 0.0, 1.0, 1.0],
        }
    )
    assert unlikely(beta=0.5)(made).tolist() == pytest.approx([0, 0, 0.75, 1.0])


def test_rank_is_under_the_policy_that_acted() -> None:
    """Whatever the policy or its reference says of the same answers now."""
    made = answers([-1.0, -2.0], [1.0, 1.0])
    late = made.with_columns(
        **{"logp@old": torch.tensor([-5.0, -1.0]), "logp@reference": torch.tensor([-5.0, -1.0])}
    )
    assert unlikely()(late).tolist() == unlikely()(made).tolist() == pytest.approx([0.875, 1.0])


def test_equal_answers_earn_the_same() -> None:
    """Ranks 0 and the mean of 1, 2, 3; rounding errors of the sampler make no difference."""
    made = answers([-1.0, -1.0 - 3e-8, -3.0, -1.0 + 3e-8], [1.0] * 4)
    assert unlikely(beta=0.25)(made).tolist() == pytest.approx([0.875, 0.875, 1.0, 0.875])


def test_groups_are_ranked_apart_in_any_order() -> None:
    made = ragged().with_columns(**{"signal:success": ragged()["reward"]})
    found = made.with_columns(reward=unlikely()(made))
    assert float((found["reward"] - made["signal:success"]).abs().max()) > 0
    mixed = shuffled(found)
    assert unlikely()(mixed).tolist() == pytest.approx(mixed["reward"].tolist())


def test_equal_likelihoods_of_two_groups_are_not_equals() -> None:
    made = answers([-2.0, -1.0, -1.0, -0.5], [1.0] * 4, group=[0, 0, 1, 1])
    assert unlikely(beta=0.5)(made).tolist() == pytest.approx([1.0, 0.75, 1.0, 0.75])


def test_right_stays_above_wrong() -> None:
    found = unlikely(beta=0.99)(answers([-1.0, -2.0, -3.0], [1.0, 0.0, 0.0])).tolist()
    assert found[0] > found[1] == found[2] == 0
    with pytest.raises(PanoplyError, match="beta"):
        pp.plan("unlikeliness", "chain", settings={"reward.beta": 1.0})


def theirs(right: torch.Tensor, logp: torch.Tensor, beta: float, epsilon: float = 1e-6) -> torch.Tensor:
    """The release's equations for one group, whose likelihoods all differ."""
    paid = right * (1 - beta * logp.argsort().argsort() / len(right))
    return (paid - paid.mean()) / (paid.std() + epsilon)


def test_advantages_are_the_releases() -> None:
    dice = torch.Generator().manual_seed(0)
    logp = -torch.rand(4, 8, generator=dice) * 5
    right = (torch.rand(4, 8, generator=dice) < 0.5).float()
    made = hand(
        **{
            "group": [g for g in range(4) for _ in range(8)],
            "logp": logp.flatten().tolist(),
            "signal:success": right.flatten(),
        }
    )
    method = unlikeliness()
    found = method.credit(made.with_columns(reward=method.reward(made)))
    expected = torch.cat([theirs(r, p, 0.25) for r, p in zip(right, logp, strict=True)])
    torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-6)


def test_rare_right_answers_get_the_larger_advantage() -> None:
    """Where GRPO pays all right answers alike."""
    made, method = answers([-1.0, -4.0, -2.0, -3.0], [1.0, 1.0, 0.0, 0.0]), unlikeliness()
    common, rare, *_ = method.credit(made.with_columns(reward=method.reward(made))).tolist()
    assert rare > common > 0
    common, rare, *_ = method.credit(made.with_columns(reward=signal()(made))).tolist()
    assert rare == common > 0


def test_groups_are_dropped_by_the_rewards_as_they_were() -> None:
    """All right: the new rewards differ, and would be credited; sampling and selection read the signal.

    Sampling gives up after some rounds and goes on with what there is, so it alone would not do.
    """
    made, method = answers([-1.0, -2.0, -3.0], [1.0] * 3), unlikeliness()
    paid = made.with_columns(reward=method.reward(made))
    assert float(method.credit(paid).abs().max()) > 0.9
    assert not bool(method.select[0](paid).any())
    assert len(varied_groups_of(paid, method.sample.settings()["name"])) == 0


def test_gradient_is_the_papers() -> None:
    """Clipped ratio with the ranked advantage, plus 0.1·k3 to the start, over all tokens."""
    method, made = unlikeliness(), ragged(drift=0.4)
    made = made.with_columns(**{"signal:success": made["reward"]})
    made = made.with_columns(reward=method.reward(made))
    credited = made.with_columns(advantage=method.credit(made))
    slow, loss = Slow(), ZERO
    for members in groups_of(made):
        rows = {e: rows_of(made, episode=e) for e in members}
        likely = {e: statistics.fmean(r["logp"] for r in rows[e]) for e in members}
        paid = {
            e: sum(r["signal:success"] for r in rows[e])
            * (1 - 0.25 * sum(likely[o] < likely[e] for o in members) / len(members))
            for e in members
        }
        spread = statistics.stdev(paid.values()) if len(set(paid.values())) > 1 else 1.0
        for e in members:
            a = (paid[e] - statistics.fmean(paid.values())) / (spread + 1e-6)
            for row in rows[e]:
                logp = slow.logp(row["state"], row["action"])
                rho, away = (logp - row["logp"]).exp(), row["logp@reference"] - logp
                loss = loss - torch.minimum(rho * a, rho.clamp(0.8, 1.2) * a) / len(made)
                loss = loss + 0.1 * (away.exp() - away - 1) / len(made)
    expected = slow.gradient(loss)
    assert_same(gradient(method, credited), expected)
    assert_same(gradient(method, shuffled(credited), micro_tokens=4), expected)


@pytest.mark.parametrize(("skip", "moves"), [(0.0, True), (1e-4, False), (1e4, True)])
def test_a_step_along_too_long_a_gradient_is_not_taken(skip: float, moves: bool) -> None:
    """The norm is the one before it is clipped, and Adam's averages stay as they are too."""
    policy, made = Tabular(), ragged()
    before = policy.logits.detach().clone()
    found = learner(policy, on_policy(update=adam(lr=0.1, clip=1e-5, skip=skip)))
    metrics = found.step(made, 0)
    assert metrics["gradient_norm"] > 1e-4
    assert bool((policy.logits != before).any()) is moves
    assert metrics.get("skipped") == (None if skip == 0 else float(not moves))
    assert bool(found.optimisers[0].state) is moves
    assert math.isfinite(metrics["loss"])


def test_losses_of_transitions_take_every_step() -> None:
    with pytest.raises(PanoplyError, match="take every step"):
        pp.plan("dqn", "cartpole", settings={"update.skip": 1.0})


def test_a_run_says_how_many_steps_it_skipped(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "sample.prompts": 2,
        "sample.group": 4,
        "sample.rounds": 2,
        "world.operations": 2,
        "run.held_out": 4,
    }
    names = ("sample.name", "select.varied_groups.name", "reward.reward.name")
    settings |= {"update.skip": 1e-3, **dict.fromkeys(names, "ended")}
    tiny.bare(tmp_path / "run", "unlikeliness", model="fresh", steps=2, settings=settings)
    assert all(row["skipped"] in (0.0, 0.5, 1.0) for row in tiny.metrics(tmp_path / "run"))
