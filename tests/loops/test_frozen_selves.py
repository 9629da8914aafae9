"""A pool of frozen selves: what is remembered of games, whom one meets, and games against them in a run."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from toys import Take

import panoply as pp
from panoply import registry
from panoply.loops.pool import Pool
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.rollout.control import ControlCollector
from panoply.slots.match.members import latest, pfsp, uniform

SMALL = {"run.held_out": 4, "policy.hidden": "8", "sample.prompts": 2, "sample.group": 4, "sample.every": 2}


def policy(seed: int = 1) -> ControlPolicy:
    world = Take()
    return ControlPolicy.fresh(world.observation, world.action, PolicySpec(hidden=()), seed=seed)


class TestPayoff:
    def test_shares_of_games_won_and_what_a_new_member_has(self) -> None:
        pool = Pool(policy())
        assert (pool.add(0), pool.add(3), len(pool), pool.steps) == (1, 2, 2, [0, 3])
        pool.record(0, 1, won=3.0, games=4)
        assert pool.payoff().tolist() == [[0.5, 0.75, 0.5], [0.25, 0.5, 0.5], [0.5, 0.5, 0.5]]
        pool.add(5)
        assert pool.payoff()[3].tolist() == [0.5, 0.75, 0.5, 0.5]  # as the policy it was; they never met
        pool.record(0, 1, won=0.0, games=4, fade=0.5)
        assert float(pool.payoff()[0, 1]) == pytest.approx(1.5 / 6)
        with pytest.raises(pp.PanoplyError, match="A pool of 3 has no member 4"):
            pool.policy(4)

    def test_members_stay_as_they_were(self) -> None:
        learns = policy()
        pool = Pool(learns)
        pool.add(0)
        before = learns.fingerprint()
        with torch.no_grad():
            next(learns.model.parameters()).add_(1.0)
        again = Pool(learns)
        again.load_state(pool.state())
        again.memory = pool.memory
        assert pool.policy(0).fingerprint() != before == pool.policy(1).fingerprint()
        assert again.policy(1).fingerprint() == before
        assert again.payoff().equal(pool.payoff())

    def test_a_step_that_failed_is_taken_back(self) -> None:
        pool = Pool(policy())
        pool.add(0)
        pool.record(0, 1, won=1.0)
        before = copy.deepcopy(pool.memory)
        pool.add(1)
        pool.record(0, 1, won=0.0)
        pool.memory = before
        assert (len(pool), pool.steps, pool.payoff().tolist()) == (1, [0], [[0.5, 1.0], [0.0, 0.5]])

    def test_whom_one_meets(self) -> None:
        pool, rng = Pool(policy()), np.random.default_rng(0)
        for step in range(3):
            pool.add(step)
        for member, lost in ((1, 1.0), (2, 0.0), (3, 3.0)):
            pool.record(0, member, won=4 - lost, games=4)
        met = np.bincount([pfsp(power=1.0)(pool, rng) for _ in range(400)], minlength=4)
        assert (met[2], met[3] > 2 * met[1] > 0) == (0, True)
        assert {latest()(pool, rng) for _ in range(9)} == {3}
        assert {uniform()(pool, rng) for _ in range(99)} == {1, 2, 3}


def test_another_plays_the_second_seat() -> None:
    """It always takes two stones, the other one: the actions of each seat are those of who has it."""
    one, two = policy(), policy()
    for who, choice in ((one, 0), (two, 1)):
        with torch.no_grad():
            for parameter in who.model.parameters():
                parameter.zero_()
            list(who.model.parameters())[-1][choice] = 100.0
    collect = ControlCollector(Take(), one, 0)
    with collect.against({1: two}):
        found = collect.episodes(collect.tasks(3), 2)
    assert (found["action"] == found["agent"]).all()
    assert (collect.episodes(collect.tasks(3), 2)["action"] == 0).all()


def test_a_league_is_resumed_bit_for_bit(tmp_path: Path, registries: None) -> None:
    registry.world("take@1")(Take)
    settings: dict[str, Any] = {**SMALL, "run.checkpoint_every": 3, "run.keep": 9}
    whole = tiny.bare(tmp_path / "whole", "grpo", world="take", sample="league", settings=settings, steps=8)
    shutil.copytree(whole.run, tmp_path / "stopped")
    (tmp_path / "stopped/result.json").unlink()
    for step in (6, 8):
        shutil.rmtree(tmp_path / f"stopped/checkpoints/step-{step:07d}")
    again = tiny.resume(tmp_path / "stopped")
    assert tiny.metrics(again.run) == tiny.metrics(whole.run)
    assert tiny.metrics(whole.run)[-1]["gradient_norm"] > 0
    for name in ("state.safetensors", "model/model.safetensors"):
        place = f"checkpoints/step-0000008/{name}"
        assert (again.run / place).read_bytes() == (whole.run / place).read_bytes()


def test_a_league_needs_a_game() -> None:
    with pytest.raises(pp.PanoplyError, match="cartpole is no game of two seats"):
        pp.plan("grpo", "cartpole", sample="league")
