"""ScalingInter-RL: the cap by hand, episodes that keep to it, a resumed run at a border, and evaluation without it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny

import panoply as pp
from panoply.errors import PanoplyError
from panoply.methods.agents.scalinginter_rl import scalinginter_rl
from panoply.slots.schedule.schedules import in_step

FEW = {"sample.prompts": 2, "sample.group": 2, "run.held_out": 4}


def test_the_cap_of_a_step_by_hand() -> None:
    """h(s) = h[min(⌊s/100⌋, 2)]; a step before the border has the old cap, the border the new one."""
    caps = [
        in_step(scalinginter_rl().sample, step, 1000).settings()["turns"]
        for step in (0, 99, 100, 199, 200, 900)
    ]
    assert caps == [6, 6, 13, 13, 20, 20]
    assert all(isinstance(cap, int) for cap in caps)


def test_a_resumed_run_has_the_cap_of_its_step(tmp_path: Path) -> None:
    """Resumed right at the border, where the released code is a step off."""
    settings = FEW | {"sample.turns.values": "1,2,3", "sample.turns.every": 1, "run.checkpoint_every": 1}
    whole = tiny.bare(tmp_path / "run", "scalinginter-rl", settings=settings, steps=3)
    logged = tiny.metrics(whole.run)
    assert [row["episode_length"] for row in logged] == [1, 2, 3]
    assert [row["truncated"] for row in logged] == [1, 1, 1], "cut off, not over"
    shutil.rmtree(whole.run / "checkpoints/step-0000003")
    (whole.run / "result.json").unlink()
    assert tiny.resume(whole.run).fingerprint == whole.fingerprint
    assert tiny.metrics(whole.run) == logged


def test_evaluation_has_the_worlds_own_cap(tmp_path: Path) -> None:
    """No door is open after one turn, and yet some are opened when it counts."""
    settings = FEW | {"sample.turns.values": "1", "run.held_out": 24}
    done = tiny.bare(tmp_path / "run", "scalinginter-rl", settings=settings, steps=1)
    assert tiny.metrics(done.run)[0]["success"] == 0
    assert done.before["sampled"] > 0


def test_where_there_is_one_turn_there_is_nothing_to_cap() -> None:
    with pytest.raises(PanoplyError, match="episodes of chain have one turn"):
        pp.plan("scalinginter-rl", "chain", settings={"sample.turns.every": 10})
