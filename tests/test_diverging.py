"""Runs that diverge: a reward or weights that are no number end them, and what was good is kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import panoply as pp
from panoply.loops import saving
from panoply.run import Run

FAULTY_REWARD = """
import torch, panoply as pp
@pp.part("reward")
def faulty(experience: pp.Experience, *, value: str = "nan", after: int = 3) -> torch.Tensor:
    signal = experience["signal:ended"]
    return signal + (float(value) if int(experience["version"][0]) >= after else 0.0)
"""


def train(folder: Path, **choices: Any) -> pp.Trained:
    """A tiny run of GRPO without the name of a signal, which the faulty reward does not take."""
    settings = {k: v for k, v in tiny.SETTINGS.items() if k != "reward.name"} | choices.pop("settings")
    return pp.train("grpo", run=folder, model="fresh", progress=tiny.Notes(), settings=settings, **choices)


@pytest.mark.usefixtures("registries")
class TestDivergence:
    @pytest.fixture
    def plugin(self, tmp_path: Path) -> str:
        (tmp_path / "faulty.py").write_text(FAULTY_REWARD)
        return str(tmp_path / "faulty.py")

    def test_a_reward_without_end(self, plugin: str, tmp_path: Path) -> None:
        """All alike, such rewards earn no credit, and no loss shows them."""
        settings = {"reward.value": "inf", "run.checkpoint_every": 2}
        with pytest.raises(
            pp.PanoplyError, match=r"in step 4 the mean reward is inf\. .* state of step 2\.$"
        ):
            train(tmp_path / "run", steps=6, reward="faulty", plugins=[plugin], settings=settings)

    def test_a_reward_that_is_not_a_number(self, plugin: str, tmp_path: Path) -> None:
        """The weights are not to blame: the state before the bad step is kept, and a mended run goes on from it."""
        settings = {"reward.value": "nan", "run.checkpoint_every": 2}
        with pytest.raises(pp.PanoplyError, match=r"Stopped: loss is .* holds the state of step 3\.$"):
            train(tmp_path / "run", steps=6, reward="faulty", plugins=[plugin], settings=settings)
        run = Run.open(tmp_path / "run")
        result = run.result()
        assert run.status() == "diverged"
        assert result is not None
        assert "loss is" in result["diverged"]
        assert result["steps"] == 3
        assert tiny.checkpoints(run.folder) == [0, 2, 3]
        assert [m["step"] for m in tiny.metrics(run.folder)] == [1, 2, 3]
        with pytest.raises(pp.PanoplyError, match="holds the state of step 3"):
            tiny.resume(run.folder)
        config = json.loads((run.folder / "run.json").read_text())
        config["plan"]["method"]["reward"]["after"] = 99
        (run.folder / "run.json").write_text(json.dumps(config))
        mended = tiny.resume(run.folder)
        choices = {"steps": 6, "reward": "faulty", "plugins": [plugin], "settings": {"reward.after": 99}}
        whole = train(tmp_path / "whole", **choices)
        assert mended.fingerprint == whole.fingerprint
        assert run.status() == "finished"

    def test_weights_that_explode(self, tmp_path: Path) -> None:
        """A step so large that the policy is noise, though every number stays finite for a while."""
        settings = {"update.lr": 1e12, "update.schedule.warmup": 0, "run.checkpoint_every": 2}
        with pytest.raises(pp.PanoplyError, match="the norm of the weights went from"):
            tiny.train(tmp_path / "run", "sft", steps=6, settings=settings)
        assert tiny.checkpoints(tmp_path / "run") == [0]
        policy = pp.load_policy(tmp_path / "run")
        assert all(bool((p.abs() < 10).all()) for p in policy.parameters())

    def test_weights_that_are_broken_before_the_step(self, tmp_path: Path) -> None:
        """The checkpoint of the step that failed is the one to blame: it is set aside for the one before."""

        class Breaking(tiny.Notes):
            def step(self, job: Any, record: Any, experience: Any) -> None:
                if job.step == 4:
                    with torch.no_grad():
                        next(iter(job.policy.parameters())).fill_(math.nan)
                    saving.save(job)

        settings = {"run.checkpoint_every": 2, "run.keep": 5}
        with pytest.raises(pp.PanoplyError, match="holds the state of step 2"):
            tiny.train(tmp_path / "run", "sft", steps=6, settings=settings, progress=Breaking())
        assert tiny.checkpoints(tmp_path / "run") == [0, 2]
        assert (tmp_path / "run/checkpoints/broken-0000004").is_dir()

    def test_the_command_says_so_and_ends_with_two(self, tmp_path: Path) -> None:
        words = tiny.words(**{"update.lr": 1e12, "update.schedule.warmup": 0})
        folder = str(tmp_path / "run")
        done = tiny.shell("train", "grpo", "--model", "fresh", *words, "--run", folder, "--quiet")
        assert done.returncode == 2
        assert done.stderr.startswith("panoply: Stopped: in step 1 the norm")
        assert done.stderr.count("\n") == 1
