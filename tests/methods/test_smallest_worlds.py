"""Every base method of control learns the smallest world that asks for it, in seconds and on more than one seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import panoply as pp
from panoply.progress import Progress
from panoply.worlds.control.tabular import Tabular
from panoply.worlds.logged.behaviour import mean_return


class Case(NamedTuple):
    world: str
    mark: float
    settings: dict[str, Any]


VALUES = {
    "policy.hidden": (32,),
    "sample.envs": 4,
    "sample.length": 100,
    "sample.fade": 1500,
    "replay.warmup": 200,
    "replay.batch": 32,
    "replay.gamma": 0.95,
    "targets.every": 50,
    "update.lr": 3e-3,
    "run.steps": 10,
    "world.variant": "chain",
}
"""Strens's chain: four steps forward past a small reward, then the large one for good. 46 is the best there is."""
OFFLINE = {"policy.hidden": (64, 64), "replay.batch": 128, "run.steps": 8, "update.lr": 1e-3}
EVERY = {"replay.every": 1, "replay.updates": 1}
NARROW = {"policy.hidden": (32, 32), "replay.batch": 64, "run.steps": 4}
CAREFUL = {"losses.conservative_q.samples": 3, "losses.soft_policy.update.lr": 1e-3}
RING = {
    "world.variant": "ring",
    "policy.hidden": (32, 32),
    "replay.batch": 64,
    "sample.length": 500,
    "sample.random": 300,
    "run.steps": 2,
}
"""One action, a point in the plane, of which six narrow places pay up to 1."""

CASES = {
    "dqn": Case("tabular", 46, {**VALUES, **EVERY}),
    "double-dqn": Case("tabular", 46, {**VALUES, **EVERY}),
    "c51": Case("tabular", 46, {**VALUES, **EVERY, "policy.span": (0.0, 20.0), "run.steps": 25}),
    "ddpg": Case("bandit", 0.8, RING),
    "td3": Case("bandit", 0.8, RING),
    "bc": Case("logged:pendulum-expert", -300, {"policy.hidden": (64, 64), "run.steps": 10}),
    "td3+bc": Case("logged:pendulum-noisy", -600, OFFLINE | NARROW),
    "cql": Case("logged:pendulum-noisy", -600, OFFLINE | NARROW | CAREFUL),
    "discrete-cql": Case(
        "logged:cartpole-mixed", 60, {**OFFLINE, "replay.batch": 64, "replay.gamma": 0.95, "update.lr": 3e-4}
    ),
    "awr": Case("logged:pendulum-mixed", -900, OFFLINE),
    "a2c": Case("cartpole", 300, {"run.steps": 5000}),
    "npg": Case("cartpole", 450, {"run.steps": 12}),
    "trpo": Case("cartpole", 450, {"run.steps": 12}),
}
"""Of logged data, marks far above its mean return: −1050 for pendulum-mixed, 27 for cartpole-mixed."""


@pytest.mark.learn
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_learns(name: str, seed: int, tmp_path: Path) -> None:
    world, mark, settings = CASES[name]
    quiet = {"run.evaluate_every": 0, "run.checkpoint_every": 10**6, "run.held_out": 20}
    done = pp.train(
        name,
        world,
        run=tmp_path / "run",
        seed=seed,
        threads=1,
        settings={**settings, **quiet},
        progress=Progress(),
    )
    assert done.before["sampled"] < mark  # the likeliest actions of new weights may be right by chance
    assert done.after["greedy"] >= mark


def test_the_mark_of_the_chain_is_the_best_there_is() -> None:
    assert mean_return(Tabular("chain"), 0.0, 0) == pytest.approx(46)
