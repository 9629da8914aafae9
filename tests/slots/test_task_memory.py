"""A table by task: what was written is found again, whatever else was, and a run that is resumed has it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from kit import hand
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, Segments
from panoply.parts import part
from panoply.rollout.text import Collector
from panoply.slots.credit.groups import episode_returns
from panoply.slots.task_memory import TaskMemory


@part("sample", equation="{prompts} of the same {pool} tasks, {group} episodes each")
def toy_from_pool(collect: Collector, *, prompts: int = 4, group: int = 1, pool: int = 6) -> Experience:
    """The tasks of a pool in turn."""
    tasks, first = collect.pool(pool), collect.state["groups"]
    return collect.episodes([tasks[(first + i) % pool] for i in range(prompts)], group)


@part("credit", equation="A = R − V̂(task)", state=dict)
def toy_tracked(
    state: dict[str, Any], experience: Experience, *, keep: float = 0.9
) -> tuple[dict[str, Any], Tensor]:
    """A single answer against what answers to its task have earned before: a Beta(α, β) that forgets slowly."""
    memory, returns = TaskMemory.of(state), episode_returns(experience)[0]
    tasks = Segments(experience.by("episode").first(experience["task"]))
    known = memory.look(tasks.keys, won=1.0, lost=1.0)
    value = known["won"] / (known["won"] + known["lost"])
    won, lost = tasks.sum(returns), tasks.sum(1 - returns)
    memory = memory.write(tasks.keys, won=keep * known["won"] + won, lost=keep * known["lost"] + lost)
    return memory.state(), experience.by("episode").rows(returns - tasks.rows(value))


def test_a_tracked_value_golden() -> None:
    rows = hand(episode=[0, 0, 1], task=[7, 7, 5], group=[0, 0, 1], reward=[0.0, 1.0, 0.0])
    state, first = toy_tracked()({}, rows)
    assert first.tolist() == [0.5, 0.5, -0.5]
    _, second = toy_tracked()(state, rows)
    assert second.tolist() == pytest.approx([1 - 1.9 / 2.8, 1 - 1.9 / 2.8, -0.9 / 2.8])


def test_a_pool_and_a_tracker_are_resumed_bit_for_bit(tmp_path: Path) -> None:
    settings = {"run.device": "cpu", "world.operations": 2, "run.held_out": 4, "reward.name": "ended"}
    parts: dict[str, Any] = {"sample": toy_from_pool(), "credit": toy_tracked()}
    done = tiny.bare(
        tmp_path / "run",
        "grpo",
        settings={**settings, "run.checkpoint_every": 1},
        model="fresh",
        steps=3,
        **parts,
    )
    shutil.copytree(done.run, tmp_path / "cut")
    (tmp_path / "cut/result.json").unlink()
    shutil.rmtree(tmp_path / "cut/checkpoints/step-0000003")
    again = tiny.resume(tmp_path / "cut")
    assert again.fingerprint == done.fingerprint
    saved = json.loads((done.run / "checkpoints/step-0000003/state.json").read_text())
    assert set(saved["parts"]) == {"collector", "credit"}


def test_what_is_written_is_found() -> None:
    ids = torch.tensor([30, 10, 20])
    first = TaskMemory().write(ids, tried=torch.tensor([3.0, 1.0, 2.0]))
    second = first.write(torch.tensor([20, 40]), tried=torch.tensor([9.0, 4.0]))
    asked = torch.tensor([40, 10, 5, 20, 30, 99])
    assert second.look(asked, tried=0.5)["tried"].tolist() == [4.0, 1.0, 0.5, 9.0, 3.0, 0.5]
    assert first.look(asked, tried=0.5)["tried"].tolist() == [0.5, 1.0, 0.5, 2.0, 3.0, 0.5], (
        "it is never changed"
    )
    assert TaskMemory().look(asked, tried=7)["tried"].tolist() == [7] * 6


def test_columns_are_written_apart() -> None:
    memory = TaskMemory().write(torch.tensor([1, 2]), tried=torch.tensor([1.0, 2.0]))
    memory = memory.write(torch.tensor([2, 3]), answer=Ragged.from_lists([[7, 8], [9]]))
    memory = TaskMemory.of({"step": 4, **memory.state()})
    found = memory.look(torch.tensor([1, 2, 3]), tried=0.0, answer=())
    assert found["tried"].tolist() == [1.0, 2.0, 0.0]
    assert found["answer"].tolist() == [[], [7, 8], [9]]
    longer = memory.write(torch.tensor([2]), answer=Ragged.from_lists([[5, 5, 5]]))
    assert longer.look(torch.tensor([3, 2]), answer=())["answer"].tolist() == [[9], [5, 5, 5]]


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(PanoplyError, match="one row a task"):
        TaskMemory().write(torch.tensor([1, 1]), tried=torch.zeros(2))
    with pytest.raises(PanoplyError, match="2 tasks were to remember 3 rows of 'tried'"):
        TaskMemory().write(torch.tensor([1, 2]), tried=torch.zeros(3))
    memory = TaskMemory().write(torch.tensor([1]), tried=torch.zeros(1))
    with pytest.raises(PanoplyError, match="'tried' of a memory holds numbers"):
        memory.look(torch.tensor([1]), tried=())
