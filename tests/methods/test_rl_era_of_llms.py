"""Works by what they are given; compounding error by hand, on planted policies, and in its table."""

from __future__ import annotations

import numpy as np
import pytest

from panoply import registry
from panoply.errors import PanoplyError
from panoply.evaluation.compounding import Task, errors, imitated, played, preferred, wrong_steps
from panoply.methods.preferences.rl_era_of_llms import compounding_error, measure, rl_era_of_llms


def dice(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_every_work_stands_below_one_heading() -> None:
    order = rl_era_of_llms()
    named = [name for names in order.values() for name in names]
    works = {w.name for w in registry.works() if w.kind in ("method", "recipe")}
    assert len(named) == len(set(named))
    assert set(named) == works, (
        "a new work that fits no heading: say what it learns from, and when, in its tags"
    )
    below = {name: heading.split(":")[0] for heading, names in order.items() for name in names}
    assert below["sft"] == "imitation"
    assert below["iql"] == "offline RL"
    assert below["rlhf"] == "inverse RL, then RL"
    assert below["dpo"] == "preferences of given answers, the reward implicit"
    assert below["chord"] == "RL with demonstrations beside it"
    assert below["ppo"] == below["grpo"] == "online RL on what the policy has just done"
    assert below["sac"] == "online RL on what was done before"


def test_wrong_steps_by_hand() -> None:
    """ε = ½ on the track and nothing right off it: ½, then ½ + ½·½ = ¾ of the second steps are wrong."""
    assert wrong_steps(0.5, 1.0, 1) == 0.5
    assert wrong_steps(0.5, 1.0, 2) == 1.25
    assert wrong_steps(0.01, 0.01, 100) == pytest.approx(1.0), (
        "where one is as good off the track, errors add up"
    )
    long, short = wrong_steps(1e-4, 1.0, 40), wrong_steps(1e-4, 1.0, 20)
    assert long / short == pytest.approx(4, rel=0.05), "else they grow with the square: T(T + 1)/2"
    assert short == pytest.approx(1e-4 * 210, rel=0.01)


def test_imitation_knows_what_was_shown_and_guesses_the_rest() -> None:
    task = Task(np.array([0, 1, 2, 3]), on=2, actions=4)
    policy = imitated(task, 200, dice(), doubt=0.0001)
    assert errors(task, policy) == (pytest.approx(0, abs=1e-5), 0.75)
    np.testing.assert_allclose(policy.sum(1), 1)
    assert errors(task, imitated(task, 1, dice()))[0] == pytest.approx(0.375, abs=0.01), (
        "one of two was shown"
    )


def test_episodes_are_played_as_they_are_counted() -> None:
    task = Task(np.array([0, 1, 2, 3]), on=2, actions=4)
    policy = np.full((4, 4), 0.1) + 0.6 * np.eye(4)
    policy[2:] = 0.25
    taken, good = played(task, policy, 4000, 6, dice())
    assert (taken.sum(1) == 6).all()
    assert 6 - good.mean() == pytest.approx(wrong_steps(*errors(task, policy), 6), abs=0.06)
    right = taken.reshape(-1, 4, 4)[:, np.arange(4), task.right].sum(1)
    np.testing.assert_array_equal(right, good)


def test_comparisons_alone_say_which_actions_are_right() -> None:
    task = Task(np.array([0, 1, 2, 3]), on=2, actions=4)
    policy = np.full((4, 4), 0.25)
    better = preferred(task, policy, 2000, 4, dice())
    assert max(errors(task, better)) < 0.2 < 0.75
    assert errors(task, preferred(task, policy, 2000, 4, dice(), beta=1e9))[0] == pytest.approx(
        0.75, abs=1e-6
    )


def test_the_table_and_what_it_refuses() -> None:
    found = compounding_error(lengths=(2, 8), pairs=300)
    assert list(found) == ["2 steps", "8 steps"]
    assert found["8 steps"]["sft success"] == pytest.approx(found["2 steps"]["sft success"] ** 4)
    assert found["8 steps"]["rlhf success"] > found["8 steps"]["sft success"]
    with pytest.raises(PanoplyError, match="lengths from 1 to 1000"):
        compounding_error(lengths=(0,))


def test_what_is_measured_is_the_difference_of_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {f"{t}": {"sft success": 0.9**t, "rlhf success": 0.95**t} for t in (4, 8, 16, 32)}
    monkeypatch.setattr("panoply.methods.preferences.rl_era_of_llms.compounding_error", lambda seed: planted)
    assert next(iter(measure(0).values())) == pytest.approx(np.log(0.95 / 0.9))
