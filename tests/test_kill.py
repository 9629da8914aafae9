"""A run killed at any moment and resumed ends like one never killed: same weights, same metrics, bit for bit."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny

STEPS = 45
OPTIONS = {"run.checkpoint_every": 3, "run.evaluate_every": 7, "run.episodes_every": 2}


class Moment:
    """A point in a process's life to wait for, found by looking at its run folder."""

    def __init__(self, kind: str, dice: random.Random, folder: Path, start_up: float):
        self.kind, self.folder, self.began = kind, folder, time.monotonic()
        self.delay = dice.uniform(0, start_up if kind == "start" else 0.008)
        kept = (int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*"))
        self.lines = max(kept, default=0) + dice.randint(4 if kind == "late" else 1, 6)
        self.inode = self._inode()

    def _inode(self) -> int | None:
        try:
            return os.stat(self.folder / "metrics.jsonl").st_ino
        except OSError:
            return None

    def reached(self) -> bool:
        if self.kind == "start":
            return time.monotonic() - self.began >= self.delay
        if self.kind == "writing":
            seen = any((self.folder / "checkpoints").glob(".writing-*"))
        else:
            # A resumed process first replaces the file by the lines it keeps.
            inode = self._inode()
            fresh = inode is not None and inode != self.inode
            seen = fresh and self._lines() >= self.lines
        if seen:
            time.sleep(self.delay)
        return seen

    def _lines(self) -> int:
        return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")


def kill_often(
    start: Callable[[], int], folder: Path, seed: int, *, kills: int, start_up: float
) -> list[str]:
    """Start a process again and again, killing it at random moments, until it is left to end by itself.

    start_up   the seconds after the start in which the kills of a process that still starts fall
    """
    dice = random.Random(seed)
    kinds = ["start", "writing", "late", *dice.choices(["start", "writing", "step"], k=kills - 3)]
    done: list[str] = []
    for kind in [*kinds, None]:
        pid = start()
        if kind is None:
            assert os.waitpid(pid, 0)[1] == 0
            return done
        moment = Moment(kind, dice, folder, start_up)
        while not moment.reached():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:  # on a busy machine the watcher may miss its moment
                assert status == 0
                return done
            time.sleep(0.0005)
        os.kill(pid, signal.SIGKILL)
        if os.waitpid(pid, 0)[1] == 0:
            return done
        done.append(f"{kind} at step {_last_step(folder)}")
    raise AssertionError


def _last_step(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def assert_same_run(killed: Path, whole: Path, steps: int = STEPS) -> None:
    ours, theirs = tiny.result(killed), tiny.result(whole)
    assert ours["fingerprint"] == theirs["fingerprint"]
    moved = [m for m in tiny.metrics(whole) if m["gradient_norm"] > 0]
    assert len(moved) > steps / 2, "nothing is shown: the run hardly learned"
    assert tiny.untimed(ours) == tiny.untimed(theirs)
    assert tiny.model_bytes(killed, steps) == tiny.model_bytes(whole, steps)
    state = f"checkpoints/step-{steps:07d}/state.safetensors"
    assert (killed / state).read_bytes() == (whole / state).read_bytes()
    assert [m["step"] for m in tiny.metrics(killed)] == list(range(1, steps + 1))
    assert tiny.metrics(killed) == tiny.metrics(whole)
    assert (killed / "episodes.jsonl").read_bytes() == (whole / "episodes.jsonl").read_bytes()
    assert tiny.checkpoints(killed) == tiny.checkpoints(whole)
    assert not [p.name for p in killed.rglob(".*")], "leftovers of killed writers"


VARIANTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "plain": ("grpo", 10, {}),
    "reference": ("grpo", 4, {"regularise.kl": 0.1, "update.epochs": 2, "update.minibatches": 2}),
    "baseline": ("reinforce", 5, {}),  # a part's state
    "pairs": ("dpo", 4, {}),
    "momentum": ("sft", 4, {"update": "sgd", "update.momentum": 0.9}),
}
"""Method, number of kills, settings."""


@pytest.fixture(scope="module")
def fire(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """Every variant trained once in peace and once under fire, and when the kills were."""
    folder, seed = tmp_path_factory.mktemp("fire"), random.randrange(10**6)
    env = tiny.environment(PYTHONPATH=os.pathsep.join([str(tiny.ROOT), str(Path(__file__).parent)]))
    code = f"import test_kill; test_kill.drive({str(folder)!r}, {seed})"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=400)
    print(f"seed of the kills: {seed}\n{done.stdout}{done.stderr}")
    assert done.returncode == 0
    return folder, json.loads(done.stdout)


def drive(folder: str, seed: int) -> None:
    """Runs in a process of its own, which imports everything and forks, so that a kill costs next to nothing."""
    for module in ("panoply.loops.dataset", "panoply.loops.on_policy", "panoply.api"):
        importlib.import_module(module)
    importlib.import_module("torch._dynamo")  # torch.optim imports it on first use, which takes seconds
    report = {}
    for name, (method, kills, settings) in VARIANTS.items():
        whole, killed = Path(folder) / name / "whole", Path(folder) / name / "killed"
        choices = {"steps": STEPS, "settings": {**OPTIONS, **settings}}

        def start(folder: Path, method: str = method, choices: dict[str, Any] = choices) -> int:
            if (folder / "run.json").exists():
                return forked(lambda: tiny.resume(folder))
            return forked(lambda: tiny.train(folder, method, **choices))

        assert os.waitpid(start(whole), 0)[1] == 0
        for attempt in range(5):
            report[name] = kill_often(
                partial(start, killed), killed, seed + attempt, kills=kills, start_up=0.1
            )
            if len(report[name]) == kills:
                break
            shutil.rmtree(killed)
    print(json.dumps(report))


def forked(work: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


@pytest.mark.parametrize("name", VARIANTS)
def test_kills_change_nothing(name: str, fire: tuple[Path, dict[str, list[str]]]) -> None:
    folder, kills = fire
    assert len(kills[name]) == VARIANTS[name][1]
    assert_same_run(folder / name / "killed", folder / name / "whole")


def test_a_killed_baseline_is_remembered(fire: tuple[Path, dict[str, list[str]]]) -> None:
    state = f"checkpoints/step-{STEPS:07d}/state.json"
    ours, theirs = (
        json.loads((fire[0] / "baseline" / name / state).read_text())["parts"] for name in ("killed", "whole")
    )
    assert ours == theirs
    assert 0 <= ours["credit"]["baseline"] <= 1


def test_the_command_killed_and_resumed(tmp_path: Path, fire: tuple[Path, dict[str, list[str]]]) -> None:
    """The same run through the command line, in processes of their own."""
    seed, killed = random.randrange(10**6), tmp_path / "killed"
    print(f"seed of the kills: {seed}")
    choices = [*tiny.words(**OPTIONS), "--model", "fresh", "--threads", "1", "--steps", str(STEPS), "--quiet"]

    def start() -> int:
        planned = ["train", "grpo", *choices, "--run", str(killed)]
        resumed = ["train", "--resume", str(killed), "--quiet"]
        words = resumed if (killed / "run.json").exists() else planned
        process = subprocess.Popen(tiny.command(*words), env=tiny.environment(), stdout=subprocess.DEVNULL)
        return process.pid

    kill_often(start, killed, seed, kills=3, start_up=2.5)
    assert_same_run(killed, fire[0] / "plain" / "whole")
