"""Data of a real run: the episodes it collected, whole and in order, and what its policy does in the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import panoply as pp
from panoply.errors import PanoplyError
from panoply.progress import Progress
from panoply.worlds.control.cartpole import Cartpole
from panoply.worlds.logged import online
from panoply.worlds.logged.logged import Logged

STEPS = {
    "sample.envs": 2,
    "sample.length": 60,
    "sample.random": 200,
    "replay.warmup": 1000,
    "policy.hidden": (4,),
    "replay.scale": 0.5,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """240 steps at random in two environments, of which nothing is learned; the policy happens to be better."""
    settings = {**STEPS, "run.steps": 2, "run.held_out": 2, "run.keep": 9}
    done = pp.train(
        "dqn",
        "cartpole",
        run=tmp_path_factory.mktemp("runs") / "dqn",
        seed=2,
        threads=1,
        settings=settings,
        progress=Progress(),
    )
    return str(done.run)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANOPLY_CACHE", str(tmp_path / "cache"))


def test_collected(run: str) -> None:
    """Each row follows from the one before it by the world's own dynamics, and every episode came to its end."""
    data = online.collected(run, 100)
    assert 100 <= len(data) <= 240
    assert data.complete.all()
    assert (data.columns["reward"] == 1).all()  # the replay kept halves
    envs, columns = Cartpole().envs(len(data)), data.columns
    envs.reset_to(np.arange(len(data)), {"body": columns["observation"].astype(np.float64)})
    step = envs.step(columns["action"])
    np.testing.assert_allclose(envs.observations, data.next_observation, atol=1e-5)
    assert (step.terminated == columns["terminated"]).all()
    everything = online.collected(run, 10**6)
    assert len(data) < len(everything) <= 240
    seen = {row.tobytes() for row in everything.columns["observation"]}
    assert {row.tobytes() for row in columns["observation"]} <= seen


def test_the_five_data_sets(run: str) -> None:
    made = {
        mix: Logged("cartpole", mix, 150, run=run).data.about
        for mix in ("random", "expert", "mixed", "noisy", "replay")
    }  # type: ignore[arg-type]
    assert made["replay"]["saco"] == 1
    assert made["replay"]["lsaco"] == 1
    for about in made.values():
        low, high = about["return_random"], about["return_expert"]
        assert about["tq"] == pytest.approx((about["return_mean"] - low) / (high - low))
    assert made["expert"]["tq"] > made["noisy"]["tq"] > made["random"]["tq"]
    scripted = Logged("cartpole", "expert", 150).data.about
    assert (
        scripted["return_expert"] > made["expert"]["return_expert"]
    )  # an untrained policy is no scripted expert


def test_what_has_no_replay_is_refused(run: str, tmp_path: Path) -> None:
    settings = {"sample.length": 8, "update.minibatches": 1, "run.steps": 1, "run.held_out": 2}
    other = pp.train(
        "ppo", "cartpole", run=tmp_path / "ppo", threads=1, settings=settings, progress=Progress()
    )
    with pytest.raises(PanoplyError, match="has no replay: data comes from a run of an off-policy method"):
        online.collected(str(other.run), 10)
