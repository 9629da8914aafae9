"""Environments on samplers: the same rows by one, two or three; where episodes end together, those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny

import panoply as pp
from panoply.experience import TERMINATED
from panoply.run import Run
from panoply.scale import fragments

PPO = {"sample.envs": 6, "sample.length": 40, "update.epochs": 1, "run.held_out": 2}
SAC = {"sample.envs": 6, "sample.random": 12, "replay.batch": 8, "run.held_out": 2, "run.evaluate_every": 0}


def train(
    folder: Path, method: str, world: str, samplers: int, settings: dict[str, Any], **more: Any
) -> pp.Trained:
    spread = {"samplers": samplers, "cluster": "threads"} if samplers else {}
    return tiny.bare(folder, method, world=world, settings=settings, **{"steps": 3, **spread, **more})


def told(made: pp.Trained) -> tuple[str, list[dict[str, Any]]]:
    """Fingerprint and metrics, but for those of time and of workers."""
    skipped = (*tiny.TIMING, "store_bytes")
    rows = [
        {k: v for k, v in row.items() if not k.startswith(skipped)}
        for row in map(tiny.untimed, tiny.metrics(made.run))
    ]
    return made.fingerprint, rows


def test_the_number_of_samplers_changes_nothing(tmp_path: Path) -> None:
    """CartPole's episodes end whenever they do: numbers go by place, and the budget counts those that began."""
    found = [told(train(tmp_path / str(n), "ppo", "CartPole-v1", n, PPO)) for n in (1, 2, 3)]
    assert found[0] == found[1] == found[2]
    counted = {row["total_episodes"] for row in found[0][1]}
    assert max(counted) < 3 * 6 * 40 / 8
    lines = Run.open(tmp_path / "2").workers()
    assert {(line["worker"], line["role"]) for line in lines} == {(f"sampler-{i}", "sampler") for i in (0, 1)}
    assert [line["tokens"] for line in lines] == [3 * 40] * 6
    assert [line["version"] for line in lines] == [0, 0, 1, 1, 2, 2]


def test_episodes_are_numbered_by_place(tmp_path: Path) -> None:
    """Row r of six begins its k-th episode as number 6k + r, and no two have one number."""
    quiet: dict[str, Any] = {"threads": 1, "progress": pp.Progress(), "samplers": 2, "cluster": "threads"}
    with pp.steps("ppo", "CartPole-v1", run=tmp_path / "run", steps=1, settings=PPO, **quiet) as steps:
        rows = next(steps).experience
    episodes = rows.by("episode")
    numbers = sorted(episodes.keys.tolist())
    assert len(numbers) > 6, "no row has ended an episode"
    waves = [sum(n % 6 == row for n in numbers) for row in range(6)]
    assert numbers == sorted(6 * wave + row for row in range(6) for wave in range(waves[row]))
    assert int(episodes.sum((rows["end"] == TERMINATED).long()).max()) == 1


def test_where_episodes_end_together_it_is_one_process_bit_for_bit(tmp_path: Path) -> None:
    settings = {**PPO, "sample.length": 130}  # 200 steps an episode: one ends in the second fragment
    alone = told(train(tmp_path / "alone", "ppo", "Pendulum-v1", 0, settings))
    assert told(train(tmp_path / "two", "ppo", "Pendulum-v1", 2, settings)) == alone


def test_whole_episodes_are_those_of_one_process_to_rounding(tmp_path: Path) -> None:
    settings = {"sample.prompts": 3, "sample.group": 2, "run.held_out": 2}
    (_, alone), (_, apart) = (
        told(train(tmp_path / str(n), "grpo", "CartPole-v1", n, settings, steps=1)) for n in (0, 2)
    )
    assert alone[0] == pytest.approx(apart[0], rel=1e-5, abs=1e-5)
    assert alone[0]["total_decisions"] > 60


def test_samplers_fill_the_replay_of_an_off_policy_learner(tmp_path: Path) -> None:
    """A fragment of one step is played with the newest weights: then it is one process, bit for bit."""
    settings = {**SAC, "sample.length": 1}
    alone = told(train(tmp_path / "alone", "sac", "Pendulum-v1", 0, settings, steps=6))
    assert told(train(tmp_path / "two", "sac", "Pendulum-v1", 2, settings, steps=6)) == alone
    longer = {**SAC, "sample.length": 5}
    found = [told(train(tmp_path / f"longer-{n}", "sac", "Pendulum-v1", n, longer)) for n in (1, 2)]
    assert found[0] == found[1]


def test_who_dies_in_a_fragment_is_stood_in_for_by_one_who_plays_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = told(train(tmp_path / "calm", "ppo", "CartPole-v1", 2, PPO))
    asked, fragment = [], fragments.Fragments._ask

    def ask(self: Any, method: str, shares: Any) -> Any:
        asked.append(method)
        if len(asked) == 2:  # open episodes are lost with it
            self.crew.members[0].handle.kill()
        return fragment(self, method, shares)

    monkeypatch.setattr(fragments.Fragments, "_ask", ask)
    assert told(train(tmp_path / "struck", "ppo", "CartPole-v1", 2, PPO)) == undisturbed
    assert max(line["restarts"] for line in Run.open(tmp_path / "struck").workers()) == 1


def test_a_resumed_run_plays_open_episodes_again(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "ppo", "CartPole-v1", 2, {**PPO, "run.checkpoint_every": 1})
    plan = Run.open(tmp_path / "whole").plan()
    for step in pp.steps(plan, run=tmp_path / "left", progress=pp.Progress()):
        if step.number == 2:
            break
    assert tiny.resume(tmp_path / "left").fingerprint == whole.fingerprint
