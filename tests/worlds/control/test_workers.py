"""Environments in worker processes: the same numbers as in this one, and what happens when a process is lost."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import panoply as pp
from panoply.errors import PanoplyError
from panoply.progress import Progress
from panoply.run import Run
from panoply.worlds.control.gymnasium import Gymnasium
from panoply.worlds.control.workers import WorkerEnvs


class Troubled(gymnasium.Env[Any, Any]):
    """In the third step of an episode: kills its process, hangs, raises, or shows NaN, once or always."""

    def __init__(self, fault: str = "die", once: str = ""):
        self.fault, self.once, self.t = fault, Path(once) if once else None, 0
        self.observation_space = gymnasium.spaces.Box(-1, 1, (2,))
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        if self.fault == "born dead":
            os._exit(1)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        seen = np.full(2, self.t / 10, np.float32)
        if self.t == 3 and self._due():
            if self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "hang":
                time.sleep(60)
            if self.fault == "raise":
                raise RuntimeError("the arm broke")
            seen = seen * np.nan
        return seen, 1.0, False, False, {}

    def _due(self) -> bool:
        """Always, or for whoever is the first to make the file `once`."""
        try:
            if self.once:
                self.once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


gymnasium.register("Troubled-v0", entry_point=Troubled, max_episode_steps=5)


def worker_envs(world: Gymnasium, size: int) -> WorkerEnvs:
    made = world.envs(size)
    assert isinstance(made, WorkerEnvs)
    return made


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "Taxi-v4"])
def test_the_same_numbers_as_in_one_process(env: str) -> None:
    """Five environments on two processes; episodes that end stay as they are until they are begun again."""
    alone, shared = (
        Gymnasium(env=env, time_limit=7).envs(5),
        Gymnasium(env=env, time_limit=7, workers=2).envs(5),
    )
    rng = np.random.default_rng(0)
    for envs in (alone, shared):
        envs.reset(np.arange(5), np.arange(5) + 3)
    for t in range(16):
        if t == 9:
            for envs in (alone, shared):
                envs.reset(np.array([1, 4]), np.array([77, 78]))
        assert np.array_equal(alone.observations, shared.observations)
        assert (alone.masks is None) == (shared.masks is None) == (env != "Taxi-v4")
        assert alone.masks is None or np.array_equal(alone.masks, np.asarray(shared.masks))
        actions = (
            rng.uniform(-2, 2, (5, 1)).astype(np.float32) if env == "Pendulum-v1" else rng.integers(0, 2, 5)
        )
        for ours, theirs in zip(alone.step(actions)[:3], shared.step(actions)[:3], strict=True):
            assert np.array_equal(ours, theirs)
    shared.close()


def test_training_is_the_same(tmp_path: Path) -> None:
    settings = {"sample.envs": 4, "sample.length": 16, "update.epochs": 1, "run.held_out": 2}
    found = [
        pp.train(
            "ppo", "CartPole-v1", run=tmp_path / str(workers), steps=2, threads=1,
            settings={**settings, "world.workers": workers}, progress=Progress(),
        ).fingerprint
        for workers in (0, 2)
    ]  # fmt: skip
    assert found[0] == found[1]


def test_a_killed_worker_costs_its_episodes_only() -> None:
    envs = worker_envs(Gymnasium(workers=2), 4)
    envs.reset(np.arange(4), np.arange(4))
    envs.step(np.zeros(4, dtype=int))
    seen = envs.observations.copy()
    victim = envs._workers[0].process.pid
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    step = envs.step(np.zeros(4, dtype=int))
    assert step.truncated.tolist() == [True, True, False, False]
    assert step.reward.tolist() == [0, 0, 1, 1]
    assert np.array_equal(envs.observations[:2], seen[:2])
    assert not np.array_equal(envs.observations[2:], seen[2:])
    assert envs.failures() == {"CartPole-v1: a worker process died and was replaced": 1}
    envs.reset(np.array([0, 1]), np.array([0, 1]))
    fresh, _ = gymnasium.make("CartPole-v1").reset(seed=1)
    assert np.array_equal(envs.observations[1], fresh)
    assert envs.step(np.zeros(4, dtype=int)).reward.tolist() == [1, 1, 1, 1]
    envs.close()


def test_a_hanging_worker_is_replaced() -> None:
    envs = worker_envs(Gymnasium(env="Troubled-v0", options="{fault: hang}", workers=1, patience=0.2), 2)
    envs.reset(np.arange(2), np.arange(2))
    for _ in range(2):
        assert not envs.step(np.zeros(2, dtype=int)).truncated.any()
    assert envs.step(np.zeros(2, dtype=int)).truncated.all()
    assert list(envs.failures()) == [
        "Troubled-v0: a worker process did not answer for 0.2 s and was replaced"
    ]
    envs.close()


@pytest.mark.parametrize(
    ("fault", "said"),
    [("die", "a worker process died"), ("raise", "the arm broke"), ("nan", "not finite")],
)
def test_the_run_goes_on_and_counts(fault: str, said: str, tmp_path: Path) -> None:
    lines: list[str] = []

    class Notes(Progress):
        def say(self, text: str) -> None:
            lines.append(text)

        def evaluated(self, job: Any, found: Any) -> None:
            (tmp_path / "once").unlink(missing_ok=True)

    options = f"{{fault: {fault}, once: {tmp_path / 'once'}}}"
    settings = {"world.options": options, "world.workers": 2, "sample.envs": 2, "sample.length": 8}
    settings |= {"update.epochs": 1, "update.minibatches": 1, "run.held_out": 2, "run.evaluate_every": 0}
    plan = pp.plan("ppo", "Troubled-v0", steps=2, threads=1, settings=settings)
    (tmp_path / "once").touch()  # not while the beginning is evaluated
    done = pp.train(plan, run=tmp_path / "run", progress=Notes())
    assert [row["reward_failures"] for row in Run.open(done.run).metrics()] == [1, 1]
    assert len([line for line in lines if said in line]) == 1


def test_what_cannot_work_is_said() -> None:
    envs = Gymnasium(env="Troubled-v0", options="{fault: born dead}", workers=1).envs(1)
    with pytest.raises(PanoplyError, match="ends whenever it begins an episode"):
        envs.reset(np.arange(1), np.arange(1))
    envs.close()
    with pytest.raises(PanoplyError, match="workers must be from 0 to 1000"):
        Gymnasium(workers=-1)


def test_a_worker_does_not_outlive_the_run() -> None:
    envs = worker_envs(Gymnasium(workers=1), 1)
    process = envs._workers[0].process
    envs.close()
    assert not process.is_alive()
