"""Off-policy and offline methods reach their marks on the smallest worlds that ask for them."""

from __future__ import annotations

from pathlib import Path

import pytest

import panoply as pp
from panoply.progress import Progress


@pytest.mark.learn
@pytest.mark.parametrize("seed", [0, 1])
def test_sac(seed: int, tmp_path: Path) -> None:
    """−200 on held-out starts after 7,500 steps of the preset's 10,000."""
    settings = {"run.steps": 15, "run.evaluate_every": 15}
    done = pp.train(
        "sac", "pendulum", run=tmp_path / "run", seed=seed, threads=1, settings=settings, progress=Progress()
    )
    assert done.before["greedy"] < -1000
    assert done.after["greedy"] > -200


@pytest.mark.learn
def test_iql(tmp_path: Path) -> None:
    """Far above the data, four fifths of which are random (mean return about −1050)."""
    settings = {"run.steps": 10, "run.evaluate_every": 10}
    done = pp.train(
        "iql",
        "logged:pendulum-mixed",
        run=tmp_path / "run",
        threads=1,
        settings=settings,
        progress=Progress(),
    )
    assert done.after["greedy"] > -500


@pytest.mark.learn
@pytest.mark.parametrize("name", ["awac", "crr"])
def test_critic_weighted_imitation(name: str, tmp_path: Path) -> None:
    """With small networks, above what imitating all of the data would reach (it earns about −1050)."""
    small = {"policy.hidden": (64, 64), "replay.batch": 64, "replay.gamma": 0.95, "update.lr": 1e-3}
    if name == "awac":
        small["targets.tau"] = 0.05
    done = pp.train(
        name,
        "logged:pendulum-mixed",
        run=tmp_path / "run",
        threads=1,
        settings={**small, "run.steps": 10, "run.evaluate_every": 10},
        progress=Progress(),
    )
    assert done.after["greedy"] > -700


@pytest.mark.learn
def test_impala(tmp_path: Path) -> None:
    """Half of CartPole's 500 with actors two steps behind."""
    done = pp.train(
        "impala",
        "cartpole",
        run=tmp_path / "run",
        threads=1,
        settings={"sample.by": "past:2", "run.evaluate_every": 2500},
        progress=Progress(),
    )
    assert done.after["sampled"] > 200
