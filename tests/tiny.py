"""Runs small enough for tests: two operations, a handful of episodes, in this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import forks

import panoply as pp
from panoply.progress import Progress

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "run.device": "cpu",
    "world.operations": 2,
    "run.held_out": 8,
    "sample.prompts": 2,
    "sample.group": 4,
    "reward.name": "ended",
}
"""Answers of new weights never succeed, but some end: without a reward that differs nothing would be learned.

On a CPU, where the same run gives the same bits."""
TIMING = ("seconds", "tokens_per_second", "peak_memory_mb")


class Notes(Progress):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def train(folder: Path, method: str = "grpo", **choices: Any) -> pp.Trained:
    """A run of a few steps with new weights."""
    settings = dict(SETTINGS) if method in ("grpo", "reinforce") else {
        "world.operations": 2, "run.held_out": 8, "data.batch": 16
    }  # fmt: skip
    settings |= choices.pop("settings", {})
    return bare(folder, method, settings=settings, **{"model": "fresh", "steps": 4, **choices})


def bare(folder: Path, method: Any, **choices: Any) -> pp.Trained:
    """A run with no settings but those given, in silence and on one thread."""
    return pp.train(method, run=folder, **{"threads": 1, "progress": Progress(), **choices})


def resume(folder: Path, progress: Progress | None = None) -> pp.Trained:
    return pp.train(resume=folder, progress=progress or Progress())


def words(**settings: Any) -> list[str]:
    """The command line's `--set` words for a tiny run."""
    return [w for k, v in {**SETTINGS, **settings}.items() for w in ("--set", f"{k}={v}")]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from panoply.cli import main; main()", *arguments]


def environment(**more: str) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("COV_")}
    return {**plain, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def shell(*arguments: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, from which a traceback cannot hide."""
    start = (
        subprocess.run
        if any(name.startswith("PYTHON") for name in more.keys() - {"PYTHONPATH"})
        else forks.run
    )
    return start(
        command(*arguments), cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=120
    )


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Every line of the metrics without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [untimed(row) for row in rows]


def untimed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in TIMING and not k.startswith("seconds_")}


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").glob("step-*"))


def model_bytes(folder: Path, step: int) -> bytes:
    return (folder / f"checkpoints/step-{step:07d}/model/model.safetensors").read_bytes()
