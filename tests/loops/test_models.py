"""Models beside the policy that are asked before anybody acts, and that learn without gradients."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
import torch
from kit import hand
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.parts import part
from panoply.planning import make_plan
from panoply.slots.model.model import Model
from panoply.worlds.world import Task


class Probe:
    """A running mean of success by a task's number of operations, which begins at ½."""

    def __init__(self) -> None:
        self.won, self.asked = torch.full((8,), 0.5), torch.ones(8)

    def expects(self, tasks: Sequence[Task]) -> Tensor:
        kind = torch.tensor([len(t.prompt) % 8 for t in tasks])
        return (self.won / self.asked)[kind]

    def learn(self, collected: Experience, step: int) -> dict[str, float]:
        episodes = collected.by("episode")
        kind = collected.context.tensor("shared")[episodes.first(collected["context"])] % 8
        self.won.index_add_(0, kind, episodes.sum(collected["reward"].float()))
        self.asked.index_add_(0, kind, torch.ones(len(kind)))
        return {"asked": float(self.asked.sum())}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "counts.txt").write_text(" ".join(map(repr, [*self.won.tolist(), *self.asked.tolist()])))

    def load_weights(self, folder: Path) -> None:
        told = torch.tensor([float(word) for word in (folder / "counts.txt").read_text().split()])
        self.won, self.asked = told[:8], told[8:]


@part("model", gives={"model:toy_probe"})
def toy_probe(seat: Any) -> Model:
    return Model(Probe(), ask=Probe.expects, learn=Probe.learn)


@part("sample", needs={"model:toy_probe"})
def toy_frontier(collect: Any, *, prompts: int = 2, group: int = 4) -> Experience:
    """Of three times as many tasks those whose success is the most uncertain."""
    tasks = collect.tasks(3 * prompts)
    doubt = (collect.models["toy_probe"](tasks) - 0.5).abs()
    return collect.episodes([tasks[i] for i in doubt.argsort(stable=True)[:prompts].tolist()], group)


SETTINGS = {
    "run.held_out": 8,
    "reward.name": "ended",
    "world.levels": (1, 2),
    "run.device": "cpu",
    "run.checkpoint_every": 2,
}


def test_a_probe_is_asked_and_learns_and_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    slots = {"sample": toy_frontier(), "models": [toy_probe()]}
    tiny.bare(whole, "grpo", model="fresh", steps=4, settings=SETTINGS, **slots)
    rows = tiny.metrics(whole)
    assert [row["toy_probe_asked"] for row in rows] == [16.0, 24.0, 32.0, 40.0], (
        "all answers, selected or not"
    )
    shutil.copytree(whole, stopped)
    (stopped / "result.json").unlink()
    shutil.rmtree(stopped / "checkpoints/step-0000004")
    tiny.resume(stopped)
    assert tiny.metrics(stopped) == rows
    assert tiny.model_bytes(stopped, 4) == tiny.model_bytes(whole, 4)


class Witness(Probe):
    """Remembers how the policy finds this step's answers when it is its turn to learn."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy

    def learn(self, collected: Experience, step: int) -> dict[str, float]:
        now = self.policy.score(collected, frozenset())["logp"]
        return {"moved": float((now - collected["logp"]).abs().max())}


@part("model")
def toy_witness(seat: Any) -> Model:
    return Model(Witness(seat.policy), learn=Witness.learn)


def test_what_learns_without_gradients_does_so_when_the_policy_has_moved(tmp_path: Path) -> None:
    settings = {**tiny.SETTINGS, "update.lr": 0.01, "update.schedule": "constant"}
    tiny.bare(tmp_path / "run", "grpo", model="fresh", steps=1, settings=settings, models=[toy_witness()])
    (row,) = tiny.metrics(tmp_path / "run")
    assert row["toy_witness_moved"] > 1e-3 > row["step0_gap"]


def test_the_probe_decides_who_is_asked() -> None:
    """By hand: kinds of three and four tokens are known to fail and to be even; the even ones are taken."""
    probe = Probe()
    tasks = [Task(i, tuple(range(n))) for i, n in enumerate((3, 4, 3, 4, 3, 4))]
    probe.asked[3] += 9

    class Asked:
        models: ClassVar[dict[str, Any]] = {"toy_probe": probe.expects}

        def tasks(self, n: int) -> list[Task]:
            return tasks

        def episodes(self, asked: list[Task], group: int) -> Experience:
            return hand(task=[t.id for t in asked])

    assert toy_frontier()(Asked())["task"].tolist() == [1, 3]


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(
        PanoplyError,
        match=r"sample \(toy_frontier\) needs the model 'toy_probe', which model.toy_probe gives",
    ):
        make_plan("grpo", slots={"sample": toy_frontier()})
