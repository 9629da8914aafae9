"""A run killed at any moment and resumed ends like one never killed: same weights, same metrics, bit for bit.

A sample; `python tests/kill.py --kills 1000` kills as often as is asked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import kill
import pytest
import tiny

KILLS: dict[str, tuple[str, ...]] = {
    "grpo": ("start", "writing", "late", "files", "after an end"),
    "reference": ("late", "writing"),
    "reinforce": ("late", "step"),
    "dpo": ("start", "writing", "late"),
    "sft": ("late", "files"),
    "ppo": ("writing", "late", "late", "files"),
    "sac": ("start", "late", "files"),
    "several": ("late", "writing"),
    "rlhf": ("first files", "files", "after an end", "late"),
}
"""Which cases are killed when. A case that ends before its moment comes, on a busy machine, is killed less often."""


def short(name: str) -> kill.Case:
    """As many steps as its kills need: each takes a run at most six steps further."""
    case, most = kill.CASES[name], 6 * len(KILLS[name]) + 3
    return dataclasses.replace(case, steps=min(case.steps, most))


@pytest.fixture(scope="module")
def fire(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """Every case trained once in peace and once under fire, and when the kills were."""
    folder, seed = tmp_path_factory.mktemp("fire"), random.randrange(10**6)
    env = tiny.environment(PYTHONPATH=os.pathsep.join([str(tiny.ROOT), str(Path(__file__).parent)]))
    code = f"import test_kill; test_kill.drive({str(folder)!r}, {seed})"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=900)
    print(f"seed of the kills: {seed}\n{done.stdout}{done.stderr}")
    assert done.returncode == 0
    return folder, json.loads(done.stdout)


def drive(folder: str, seed: int) -> None:
    """Runs in a process of its own, which imports everything and forks."""
    kill.warm_up()
    cases = [short(name) for name in KILLS]
    typed, moments = dataclasses.replace(short("grpo"), typed=True), ("start", "late")
    with kill.workers(os.cpu_count() or 1) as pool:
        places = [Path(folder) / name for name in KILLS]
        whole = pool.map(kill.live, cases, [p / "whole" for p in places], [0] * len(cases), [()] * len(cases))
        seeds = [seed + i for i in range(len(cases))]
        killed = pool.map(kill.live, cases, [p / "killed" for p in places], seeds, KILLS.values())
        command = pool.submit(kill.live, typed, Path(folder) / "command/killed", seed, moments)
        assert not any(whole)
        print(json.dumps({**dict(zip(KILLS, killed, strict=True)), "command": command.result()}))


@pytest.mark.parametrize("name", KILLS)
def test_kills_change_nothing(name: str, fire: tuple[Path, dict[str, list[str]]]) -> None:
    folder, kills = fire
    assert kills[name]
    assert kill.learned(folder / name / "whole"), "nothing is shown: the run hardly learned"
    assert kill.differences(folder / name / "killed", folder / name / "whole") == []


def test_what_differs_is_found(fire: tuple[Path, dict[str, list[str]]], tmp_path: Path) -> None:
    """The comparison itself: a weight, a number, a line or a file more is a difference."""
    whole, step = fire[0] / "grpo/whole", f"checkpoints/step-{short('grpo').steps:07d}"
    changes: dict[str, Callable[[Path], object]] = {
        f"{step}/model/model.safetensors": lambda f: f.write_bytes(f.read_bytes()[:-1] + b"\x01"),
        f"{step}/state.safetensors": lambda f: f.write_bytes(f.read_bytes()[:-1] + b"\x01"),
        f"{step}/state.json": lambda f: f.write_text(f.read_text().replace('"parts": {', '"parts": {"x": 1, ')),
        "metrics.jsonl": lambda f: f.write_text("".join(f.read_text().splitlines(True)[:-1])),
        "episodes.jsonl": lambda f: f.write_text(f.read_text() + "{}\n"),
        "result.json": lambda f: f.write_text(f.read_text().replace('"steps": ', '"steps": 1')),
        ".metrics.jsonl.77": lambda f: f.touch(),
    }  # fmt: skip
    for name, change in changes.items():
        shutil.copytree(whole, tmp_path / "killed")
        change(tmp_path / "killed" / name)
        found = kill.differences(tmp_path / "killed", whole)
        assert len(found) == 1, name
        assert name in found[0]
        shutil.rmtree(tmp_path / "killed")


def test_a_killed_baseline_is_remembered(fire: tuple[Path, dict[str, list[str]]]) -> None:
    last = fire[0] / "reinforce/killed/checkpoints" / f"step-{short('reinforce').steps:07d}"
    state = json.loads((last / "state.json").read_text())
    assert 0 <= state["parts"]["credit"]["baseline"] <= 1


def test_the_command_killed_and_resumed(fire: tuple[Path, dict[str, list[str]]]) -> None:
    """The same run through the command line."""
    folder, kills = fire
    assert kills["command"]
    assert kill.differences(folder / "command/killed", folder / "grpo/whole") == []
