"""Rewards made of other rewards."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from kit import hand

from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.base.grpo import grpo
from panoply.planning import make_plan
from panoply.slots.model.values import critic
from panoply.slots.reward.shaping import annealed, gated, minus_kl, overlong, sum, verdict
from panoply.slots.reward.signals import signal
from panoply.slots.schedule.schedules import in_step, linear, ramp, scheduled
from panoply.slots.update.optimisers import adam


def rows() -> Experience:
    """Episode 1 has four decisions and succeeds; episode 2 has two, episode 3 one, and both fail."""
    return hand(
        episode=[1, 1, 1, 1, 2, 2, 3],
        logp=[-1.0] * 7,
        **{
            "signal:success": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0],
            "logp@reference": [-1.0, -3.0, 0.0, -1.0, -2.0, -2.0, -1.0],
        },
    )


def test_verdict() -> None:
    assert verdict()(rows()).tolist() == [0, 0, 0, 1, 0, -1, -1]
    assert verdict(right=3.0, wrong=0.5)(rows()).tolist() == [0, 0, 0, 3.0, 0, 0.5, 0.5]


def test_minus_kl() -> None:
    """Each decision pays for its own log-ratio; what it earned stays where it was."""
    assert minus_kl(beta=0.5)(rows()).tolist() == [0, -1, 0.5, 1, -0.5, -0.5, 0]
    assert minus_kl(beta=0.5, reward=signal(scale=2.0))(rows()).tolist()[3] == 2
    assert minus_kl().needs() - signal().needs() == {"logp@reference"}


def test_minus_kl_of_nothing_needs_no_reference() -> None:
    plain = rows()
    assert minus_kl(beta=0.0)(plain).tolist() == plain["signal:success"].tolist()
    assert minus_kl(beta=0.0).needs() == signal().needs()


def test_overlong() -> None:
    """Free up to 1, then in a line to −1 at 3, and no more beyond: lengths 4, 2 and 1."""
    assert overlong(limit=3, cache=2)(rows()).tolist() == [0, 0, 0, 0, 0, -0.5, 0]
    assert overlong(limit=3, cache=2, weight=2.0, reward=verdict())(rows()).tolist() == [
        0, 0, 0, -1, 0, -2, -1
    ]  # fmt: skip


def test_overlong_bounds() -> None:
    with pytest.raises(PanoplyError, match=r"reward\.cache cannot be 30"):
        make_plan("dapo", settings={"reward.cache": 30})


def several() -> Experience:
    """Episode 1 has two decisions that both earn, episode 2 two of which none is well formed."""
    return hand(
        episode=[1, 1, 2, 2],
        logp=[-1.0] * 4,
        **{
            "signal:success": [0.0, 1.0, 0.0, 1.0],
            "signal:form": [0.25, 0.25, 0.0, 0.0],
            "signal:process": [0.5, 0.0, 0.125, 0.0],
        },
    )


def test_a_sum_keeps_what_was_earned_where_it_was() -> None:
    both = sum(first=verdict(), second=signal(name="process", scale=2.0))
    assert both(several()).tolist() == [1.0, 1.0, 0.25, 1.0]
    assert sum(second=both)(several()).tolist() == [1.0, 2.0, 0.25, 2.0]
    assert both.needs() >= {"signal:success", "signal:process"}
    assert both.equation() == "1 if success else -1 + process"


def test_a_gate_is_passed_by_whole_episodes() -> None:
    """What an episode earns on the way to its gate counts as well, and what failed earns `otherwise` once."""
    through = gated(gate=signal(name="form"), then=signal(name="process"), otherwise=-1.0)
    assert through(several()).tolist() == [0.5, 0.0, 0.0, -1.0]
    narrow = through.but(above=0.5)
    assert narrow(several()).tolist() == [0.0, -1.0, 0.0, -1.0], "0.25 + 0.25 is not more than 0.5"
    assert through.equation() == "process if form > 0 else -1"


def test_a_reward_that_fades() -> None:
    fading = annealed(reward=signal(name="process"), weight=0.5)
    assert fading(several()).tolist() == [0.25, 0.0, 0.0625, 0.0]
    assert annealed().equation() == "(linear(end=0, warmup=0, start=0))·(success)"


def test_schedules_of_rewards_inside_of_rewards_are_followed() -> None:
    """As they are in a step of ten; a part of another slot keeps its schedule, which is not the reward's to fill in."""
    process = annealed(reward=signal(name="process"), weight=ramp(first=0.5, last=0.0))
    outcome = annealed(weight=ramp(first=0.5, last=1.0))
    both = sum(first=process, second=outcome)
    assert scheduled(both)
    assert not scheduled(sum())
    assert not scheduled(critic(update=adam(schedule=linear())))
    for step, expected in {0: [0.25, 0.5, 0.0625, 0.5], 9: [0.0, 1.0, 0.0, 1.0]}.items():
        assert in_step(both, step, 10)(several()).tolist() == expected


def test_a_run_anneals(tmp_path: Path) -> None:
    """In the second of two steps nothing is left of what the first one was paid in full."""
    fades = sum(first=annealed(weight=ramp(first=1.0, last=0.0)), second=annealed(weight=0.0))
    tiny.bare(tmp_path, grpo().but(reward=fades), steps=2, settings={"sample.prompts": 8, "run.held_out": 2})
    first, second = tiny.metrics(tmp_path)
    assert first["reward"] == first["success"] > 0
    assert second["success"] > second["reward"] == 0
