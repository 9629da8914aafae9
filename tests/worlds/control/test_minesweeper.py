"""Minesweeper: numbers and openings by hand, legal cells, wins and losses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import panoply as pp
from panoply.errors import PanoplyError
from panoply.progress import Progress
from panoply.run import Run
from panoply.worlds.control.minesweeper import Minesweeper
from panoply.worlds.control.world import Array
from panoply.worlds.logged.behaviour import behave, mean_return

WORLD = Minesweeper(size=3, mines=1)


def board(*mines: int, opened: tuple[int, ...] = ()) -> dict[str, Array]:
    state = {name: np.zeros((1, 9), bool) for name in ("mines", "opened")}
    state["mines"][0, list(mines)] = True
    state["opened"][0, list(opened)] = True
    return state


def test_numbers() -> None:
    """Mines in two corners of the first row: 0 2 0 | 1 2 1 | 0 0 0, and a mine does not count itself."""
    assert WORLD.counts(board(0, 2)["mines"])[0].tolist() == [0, 2, 0, 1, 2, 1, 0, 0, 0]


def test_openings() -> None:
    """From the corner opposite to the only mine all opens but the mine: seven cells beside the first, all there is."""
    envs = WORLD.envs(1)
    envs.reset_to(np.array([0]), board(0, opened=(4,)))
    step = envs.step(np.array([8]))
    assert (step.reward[0], bool(step.terminated[0]), step.signals["success"][0]) == (1.0, True, 1.0)
    assert envs.masks is not None
    assert envs.masks[0].nonzero()[0].tolist() == [0]


def test_one_cell_and_a_mine() -> None:
    """A cell beside the mine opens alone, a seventh of what is left; the mine itself ends it."""
    envs = WORLD.envs(1)
    envs.reset_to(np.array([0]), board(0, opened=(4,)))
    step = envs.step(np.array([1]))
    assert (step.reward[0], bool(step.terminated[0])) == (1 / 7, False)
    seen = envs.observations[0].reshape(9, 10).argmax(-1)
    assert seen.tolist() == [9, 1, 9, 9, 1, 9, 9, 9, 9]
    step = envs.step(np.array([0]))
    assert (step.reward[0], bool(step.terminated[0]), step.signals["success"][0]) == (0.0, True, 0.0)


def test_the_start_is_safe_and_open() -> None:
    envs = Minesweeper().envs(64)
    envs.reset(np.arange(64), np.arange(64))
    assert (envs.state["mines"].sum(-1) == 3).all()
    assert (envs.state["opened"].sum(-1) == 1).all()
    assert not (envs.state["opened"] & envs.state["mines"]).any()
    assert len(np.unique(envs.state["mines"], axis=0)) > 20


def test_experts_and_chance() -> None:
    """The expert solves every board, and what is done by chance is legal."""
    data = behave(Minesweeper(), "random", 300, 0)
    legal = data.columns["legal"][np.arange(len(data)), data.columns["action"]]
    assert legal.all()
    assert mean_return(Minesweeper(), 0.0, 0) == pytest.approx(1)
    assert 0.1 < mean_return(Minesweeper(), 1.0, 0) < 0.8


@pytest.mark.parametrize("method", ["dqn", "ppo"])
def test_methods_obey_the_masks(method: str, tmp_path: Path) -> None:
    settings = {
        "sample.envs": 2,
        "sample.length": 20,
        "policy.hidden": (8,),
        "run.steps": 2,
        "run.held_out": 4,
    }
    settings |= {"update.minibatches": 2} if method == "ppo" else {"replay.warmup": 8, "replay.every": 4}
    done = pp.train(
        method, "minesweeper", run=tmp_path / "run", threads=1, settings=settings, progress=Progress()
    )
    assert all(np.isfinite(row["loss"]) for row in Run.open(done.run).metrics())


def test_impossible_boards_are_refused() -> None:
    with pytest.raises(PanoplyError, match="two safe ones, not 8 mines on 3²"):
        Minesweeper(size=3, mines=8)
