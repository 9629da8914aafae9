"""Gymnasium worlds: ids, spaces, manual resets, environments that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import panoply as pp
from panoply import registry
from panoply.errors import PanoplyError
from panoply.policies.control import ControlPolicy
from panoply.progress import Progress
from panoply.rollout.control import ControlCollector
from panoply.run import Run
from panoply.worlds.control.gymnasium import Gymnasium
from panoply.worlds.control.world import Box, Discrete


class Fragile(gymnasium.Env[Any, Any]):
    """Raises in the third step of an episode, or shows NaN, or pays infinity."""

    def __init__(self, fault: str = "raise"):
        self.fault, self.t = fault, 0
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2,))
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        seen, paid = np.full(2, self.t / 10, np.float32), 1.0
        if self.t == 3 and self.fault == "raise":
            raise RuntimeError("the arm broke")
        if self.t == 3:
            seen, paid = (seen * np.nan, 1.0) if self.fault == "nan" else (seen, np.inf)
        return seen, paid, False, False, {}


gymnasium.register("Fragile-v0", entry_point=Fragile, max_episode_steps=5)


def test_an_id_is_a_world() -> None:
    world = registry.find("world", "CartPole-v1").build()
    assert isinstance(world, Gymnasium)
    assert (world.name, world.horizon, world.solved) == ("CartPole-v1", 500, 475)
    assert world.action == Discrete(2)
    assert isinstance(world.observation, Box)
    assert pp.plan("ppo", "CartPole-v1").world() == world


def test_an_unknown_id_names_the_nearest() -> None:
    with pytest.raises(PanoplyError, match="Did you mean 'CartPole-v1'"):
        pp.plan("ppo", "CartPol-v1")
    with pytest.raises(PanoplyError, match=r"no environment 'Hopper-v99'. Did you mean Hopper"):
        Gymnasium(env="Hopper-v99").horizon  # noqa: B018


def test_nothing_resets_itself() -> None:
    """After the end the final observation stays, whatever is done, until `reset`."""
    envs = Gymnasium(time_limit=3).envs(2)
    envs.reset(np.arange(2), np.array([5, 6]))
    for t in range(3):
        assert envs.step(np.array([0, 1])).truncated.tolist() == [t == 2] * 2
    final = envs.observations.copy()
    envs.step(np.array([1, 1]))
    assert (envs.observations == final).all()
    envs.reset(np.array([1]), np.array([7]))
    assert (envs.observations[0] == final[0]).all()
    fresh, _ = gymnasium.make("CartPole-v1").reset(seed=7)
    assert (envs.observations[1] == fresh).all()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise", "RuntimeError: the arm broke"),
        ("nan", "not finite"),
        ("inf", "not finite"),
    ],
)
def test_an_environment_that_fails_is_cut_counted_and_said(fault: str, said: str, tmp_path: Path) -> None:
    class Notes(Progress):
        lines: list[str] = []  # noqa: RUF012

        def say(self, text: str) -> None:
            self.lines.append(text)

    settings = {"world.options": f"{{fault: {fault}}}", "sample.envs": 2, "sample.length": 8}
    settings |= {"update.epochs": 1, "update.minibatches": 1, "run.held_out": 2}
    done = pp.train(
        "ppo", "Fragile-v0", run=tmp_path / "run", steps=2, threads=1, settings=settings, progress=Notes()
    )
    from panoply.run import Run

    rows = Run.open(done.run).metrics()
    assert [row["reward_failures"] for row in rows] == [4, 10]
    assert rows[-1]["truncated"] > 0
    assert len([line for line in Notes.lines if said in line]) == 1
    assert done.after["greedy"] == 2.0


def test_arguments_of_the_environment() -> None:
    assert Gymnasium(options="{fault: nan}", env="Fragile-v0").make().unwrapped.fault == "nan"
    with pytest.raises(PanoplyError, match="Gymnasium cannot make Fragile-v0"):
        Gymnasium(options="{faul: nan}", env="Fragile-v0").make()
    with pytest.raises(PanoplyError, match="world.options are arguments"):
        Gymnasium(options="5", env="Fragile-v0").make()


class Turns(gymnasium.Env[Any, Any]):
    """Three actions, of which the one that was taken last is not legal."""

    def __init__(self) -> None:
        self.last = 0
        self.observation_space = gymnasium.spaces.Discrete(3)
        self.action_space = gymnasium.spaces.Discrete(3)

    def seen(self) -> tuple[int, dict[str, Any]]:
        return self.last, {"action_mask": np.arange(3) != self.last}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.last = 0
        return self.seen()

    def step(self, action: Any) -> Any:
        assert action != self.last, "an illegal action"
        self.last = int(action)
        seen, info = self.seen()
        return seen, float(seen == 2), False, False, info


gymnasium.register("Turns-v0", entry_point=Turns, max_episode_steps=7)


def test_action_masks() -> None:
    """What an info calls legal is all that is done, and is recorded as it was before each step and after it."""
    world = Gymnasium(env="Turns-v0")
    collect = ControlCollector(world, ControlPolicy.fresh(world.observation, world.action), seed=0)
    played = collect.rollout(2, 20)
    for by in ("context", "next"):
        seen, legal = (played.looked_up(name, by=by) for name in ("observation", "legal"))
        assert torch.equal(legal, seen[:, None] != torch.arange(3))
    assert collect.failures() == {}


@pytest.mark.parametrize("method", ["dqn", "c51", "ppo"])
def test_methods_obey_masks(method: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"sample.length": 32, "policy.hidden": (8,), "run.steps": 2, "run.held_out": 2}
    settings |= {"update.minibatches": 2} if method == "ppo" else {"replay.warmup": 8, "replay.every": 2}
    done = pp.train(
        method, "Turns-v0", run=tmp_path / "run", threads=1, settings=settings, progress=Progress()
    )
    for row in Run.open(done.run).metrics():
        assert np.isfinite(row["loss"])
        assert not row.get("reward_failures")
