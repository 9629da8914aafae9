"""LOOP: ratios of tokens, turns and episodes by hand, the filter, the released code's loss, and when a step ends."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Slow, Tabular, assert_same, batch, gradient, hand, ragged, rows_of, slopes, values_of
from tiny import bare

import panoply as pp
from panoply.loops.learner import STOPPED, Learner
from panoply.methods.agents.loop import loop, product_clip, telling
from panoply.slots.credit.groups import group
from panoply.slots.reward.signals import signal

TURNS: dict[str, Any] = {
    "episode": [1, 1, 1, 2],
    "turn": [0, 0, 1, 0],
    "group": [1] * 4,
    "logp": [0.0] * 4,
    "advantage": [1.0, 1.0, 1.0, -2.0],
}
"""Episode 1: a turn of two tokens and one of one; episode 2: a single token."""
NOW = [math.log(1.05), math.log(1.08), math.log(0.8), math.log(0.5)]


def values(**settings: Any) -> tuple[list[float], list[float]]:
    made = batch(hand(**TURNS), logp=NOW)
    found, _ = product_clip(against="behaviour", **settings)(made)
    return found.tolist(), slopes(found, made.now["logp"])


def test_each_level_by_hand() -> None:
    """Bounds 1/1.1 and 1.1. The first turn comes to 1.134, above; episode 1 to 0.9072, below, which A > 0 permits."""
    low = 1 / 1.1
    token, slope = values(level="token")
    assert token == pytest.approx([(1.05 + 1.08 + 0.8) / 3, -2 * low])
    assert slope == pytest.approx([1.05 / 3, 1.08 / 3, 0.8 / 3, 0.0])
    turn, slope = values(level="turn")
    assert turn == pytest.approx([(1.1 + 0.8) / 2, -2 * low])
    assert slope == pytest.approx([0.0, 0.0, 0.4, 0.0])
    whole, slope = values(level="episode")
    assert whole == pytest.approx([1.05 * 1.08 * 0.8, -2 * low])
    assert slope == pytest.approx([0.9072, 0.9072, 0.9072, 0.0])


def test_bounds_are_symmetric_in_the_logarithm() -> None:
    """With ε = 3 a ratio of ½ is inside of ¼ to 4; 1 − ε would be below zero."""
    assert values(level="token", epsilon=3.0)[0][1] == pytest.approx(-1.0)
    assert values(level="token", epsilon=0.5)[0][1] == pytest.approx(-2 / 1.5)


def test_products_go_far_from_one_with_length_and_tokens_do_not() -> None:
    long = hand(episode=[1] * 40, turn=[0] * 40, logp=[0.0] * 40, advantage=[1.0] * 40, group=[1] * 40)
    made = batch(long, logp=[math.log(1.05)] * 40)
    clipped = {
        level: float(product_clip(level=level, against="behaviour")(made)[1]["clip_share"].mean())  # type: ignore[arg-type]
        for level in ("token", "episode")
    }
    assert clipped == {"token": 0.0, "episode": 1.0}


def test_how_far_episodes_have_moved_is_said() -> None:
    made = batch(hand(**TURNS), logp=NOW)
    told = product_clip(against="behaviour")(made)[1]["episode_kl"].tolist()
    assert told == pytest.approx([-math.log(0.9072), math.log(2)])


# ------------------------------------------------------------------ the filter

GRADED = hand(
    group=[1] * 4, episode=[1, 2, 3, 4], reward=[0.5, 0.5, 0.52, 0.5 + 1.0], **{"signal:success": [0.0] * 4}
)


def test_the_filter_comes_after_the_baseline() -> None:
    """R = .5 .5 .52 1.5, each against the mean of the other three."""
    left_out = [-0.34, -0.34, -0.31333, 0.99333]
    assert telling()(GRADED).tolist() == pytest.approx(left_out, abs=1e-5)
    assert telling(least=0.32)(GRADED).tolist() == pytest.approx([-0.34, -0.34, 0.0, 0.99333], abs=1e-5)
    assert telling(credit=group(scale="none"), least=0.3)(GRADED).tolist() == pytest.approx([0, 0, 0, 0.745])


def test_what_is_filtered_out_still_counts() -> None:
    """Two of four episodes say nothing: the gradient of the others is a quarter of theirs each, not a half."""
    made = ragged(lengths=((2, 3), (1, 1)), drift=0.0)
    made = made.with_columns(**{"logp@old": made["logp"]})
    advantage = torch.where(made["group"] == 10, torch.where(made["episode"] == 100, 1.0, -1.0), 0.0).double()
    slow = Slow()
    loss = torch.zeros((), dtype=torch.float64)
    for e in (100, 101):
        mine = rows_of(made, episode=e)
        for row in mine:
            ratio = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
            loss = loss - (1.0 if e == 100 else -1.0) * ratio / len(mine) / 4
    assert_same(gradient(loop(), made.with_columns(advantage=advantage)), slow.gradient(loss), rel=1e-6)


def test_gradient_is_the_released_codes() -> None:
    """Parity with apple/ml-loop on a frozen batch: min(w·A, g(A)) with g(A) = 1.1·A, or A/1.1 where A < 0."""
    made, slow = ragged(drift=0.4), Slow()
    made = made.with_columns(
        **{"logp@old": made["logp"], "logp": made["logp"] + 3.0}
    )  # the sampler's word is not asked
    rows = rows_of(made)
    returns = {e: sum(r["reward"] for r in rows if r["episode"] == e) for e in values_of(made, "episode")}
    loss = torch.zeros((), dtype=torch.float64)
    for e in returns:
        mine = rows_of(made, episode=e)
        peers = sorted({r["episode"] for r in rows if r["group"] == mine[0]["group"]} - {e})
        advantage = returns[e] - statistics.fmean(returns[p] for p in peers) if peers else 0.0
        bound = advantage * 1.1 if advantage >= 0 else advantage / 1.1
        for row in mine:
            weight = (slow.logp(row["state"], row["action"]) - row["logp@old"]).exp()
            loss = loss - torch.minimum(weight * advantage, torch.tensor(bound).double()) / len(mine) / len(
                returns
            )
    method = loop()
    made = made.with_columns(advantage=method.credit(made))
    assert_same(gradient(method, made), slow.gradient(loss), rel=1e-5)


# ------------------------------------------------------------------ the end of a step


@pytest.mark.parametrize(("limit", "stopped"), [(0.5, 1.0), (2.0, 0.0)])
def test_a_policy_too_far_away_does_not_move(limit: float, stopped: float) -> None:
    """Σ log ρ is −1 on one episode and −0.6 on the other, a mean of −0.8; its sign does not matter."""
    for sign in (1, -1):
        policy = Tabular()
        made = ragged(lengths=((1, 1),), drift=0.0)
        off = torch.tensor([1.0, 0.6]).double() * sign
        made = made.with_columns(**{"logp@old": made["logp"] + off, "logp": made["logp"]})
        method = loop().but(update=loop().update.but(stop_kl=limit))
        learner = Learner(policy, method, total_steps=2, micro_tokens=100)
        before = policy.logits.detach().clone()
        told = learner.step(made.with_columns(advantage=torch.tensor([1.0, -1.0]).double()), 0)
        assert told["episode_kl"] == pytest.approx(0.8 * sign)
        assert told[STOPPED] == stopped
        assert torch.equal(before, policy.logits.detach()) == bool(stopped)


def test_epochs_end_with_it(tmp_path: Path) -> None:
    """With a limit that the first update passes, the second mini-batch is the last one looked at."""
    settings = {
        "run.held_out": 8, "sample.prompts": 4, "sample.group": 4, "reward.name": "calls",
        "update.lr": 0.02, "update.schedule.warmup": 0, "update.stop_kl": 1e-4,
    }  # fmt: skip
    bare(tmp_path / "run", "loop", world="tools", model="fresh", steps=1, settings=settings)
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert line["updates"] == 2
    assert line[STOPPED] == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"surrogate.epsilon": 0.0}, "surrogate.epsilon must be above 0"),
        ({"update.epochs": 1, "update.minibatches": 1, "update.stop_kl": 1.0}, "stop_kl"),
        ({"surrogate": "clip", "update.stop_kl": 3.0}, "how far episodes have moved"),
    ],
)
def test_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(pp.PanoplyError, match=message):
        pp.plan("loop", "tools", settings=settings)


def test_a_credit_of_something_else_is_refused() -> None:
    with pytest.raises(pp.PanoplyError, match="it gives no advantages"):
        pp.plan(loop().but(credit=telling(credit=signal())), "tools")
