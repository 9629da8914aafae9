"""Ctrl-C, SIGTERM and SIGHUP: the step is saved, the way to go on is said, nothing is left running."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny

import panoply as pp
from panoply import checkpoint, cli, stopping
from panoply.run import Run
from panoply.stopping import Patience, Stopped, patient, stoppable


def listening() -> None:
    """A shell starts what it puts into the background deaf to Ctrl-C, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Sending(tiny.Notes):
    """Sends signals to this process in the midst of a step, as the outside world does."""

    def __init__(self, *numbers: int, at: int):
        super().__init__()
        self.numbers, self.at = numbers, at

    def step(self, job: Any, record: Any, experience: Any) -> None:
        if job.step == self.at:
            for number in self.numbers:
                signal.raise_signal(number)


def test_a_run_stops_after_its_step_which_is_saved(tmp_path: Path) -> None:
    settings = {"run.checkpoint_every": 50}
    whole = tiny.train(tmp_path / "whole", steps=5, settings=settings)
    with pytest.raises(Stopped) as stopped:
        tiny.train(tmp_path / "run", steps=5, settings=settings, progress=Sending(signal.SIGINT, at=3))
    assert str(stopped.value) == f"stopped; go on with panoply train --resume {tmp_path / 'run'}"
    assert tiny.checkpoints(tmp_path / "run") == [0, 3]
    tiny.resume(tmp_path / "run")
    assert tiny.model_bytes(tmp_path / "run", 5) == tiny.model_bytes(whole.run, 5)
    assert tiny.metrics(tmp_path / "run") == tiny.metrics(whole.run)


def test_asked_twice_it_stops_at_once(tmp_path: Path) -> None:
    twice = Sending(signal.SIGINT, signal.SIGINT, at=3)
    with pytest.raises(Stopped, match="go on with"):
        tiny.train(tmp_path / "run", steps=5, settings={"run.checkpoint_every": 50}, progress=twice)
    assert tiny.checkpoints(tmp_path / "run") == [0]
    assert tiny.resume(tmp_path / "run").after["step"] == 5


def test_a_step_that_takes_too_long_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hanging(Sending):
        def step(self, job: Any, record: Any, experience: Any) -> None:
            super().step(job, record, experience)
            if job.step == self.at:
                time.sleep(60)

    monkeypatch.setattr(stopping, "PATIENCE", 0.1)
    began = time.monotonic()
    with pytest.raises(Stopped):
        tiny.train(tmp_path / "run", steps=5, progress=Hanging(signal.SIGINT, at=2))
    assert time.monotonic() - began < 30
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_a_stopped_stage_names_its_recipe(tmp_path: Path) -> None:
    settings = {
        "run.held_out": 8, "imitate.run.steps": 1, "imitate.data.batch": 4, "judge.data.batch": 4,
        "judge.run.steps": 3,
    }  # fmt: skip
    with pytest.raises(Stopped) as stopped:
        tiny.bare(tmp_path / "rlhf", "rlhf", settings=settings, progress=Sending(signal.SIGINT, at=2))
    assert str(stopped.value) == f"stopped; go on with panoply train --resume {tmp_path / 'rlhf'}"
    assert tiny.checkpoints(tmp_path / "rlhf/02-judge") == [0, 2]


def test_what_is_ignored_stays_so_and_handlers_are_put_back() -> None:
    """`nohup` makes a process deaf to SIGHUP."""
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable(), patient() as asked:
            signal.raise_signal(signal.SIGHUP)
            assert asked.asked is None
            with pytest.raises(Stopped) as stopped:
                signal.raise_signal(signal.SIGTERM)
            assert stopped.value.number == signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])
    assert {number: signal.getsignal(number) for number in stopping.SIGNALS} == before


def test_without_the_command_only_ctrl_c_waits() -> None:
    """Whoever calls from Python, or terminates a worker, keeps what SIGTERM does there."""
    with patient():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_fork_dies_of_what_its_parent_waits_with() -> None:
    with stoppable(), patient() as asked:
        asked.stepping = True
        pid = os.fork()
        if pid == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.05)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM


def test_an_import_is_not_left_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(0.1)\ndone = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def slow() -> None:
        with patient():
            importlib.import_module("slow_to_import")
            time.sleep(5)

    with pytest.raises(Stopped):
        slow()
    assert sys.modules["slow_to_import"].done
    del sys.modules["slow_to_import"]


def test_before_a_command_has_begun_nothing_is_left_to_tidy_up(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\n")
    code = "from panoply.stopping import stoppable\nwith stoppable():\n import slow_to_import"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                          env=tiny.environment(PYTHONPATH=f"{tiny.ROOT}:{tmp_path}"))  # fmt: skip
    assert (done.returncode, done.stderr) == (143, "panoply: stopped\n")


def test_patience_counts_from_the_first_step_on() -> None:
    asked = Patience()
    with pytest.raises(Stopped):
        asked.hear(signal.SIGINT, None)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_command_says_how_to_go_on(number: signal.Signals, tmp_path: Path) -> None:
    """With environments in processes of their own, which end with it."""
    run = tmp_path / "run"
    words = ["train", "ppo", "--world", "CartPole-v1", "--set", "world.workers=2", "--set", "run.held_out=2"]
    words += ["--set", "sample.envs=2", "--set", "sample.length=8", "--set", "run.evaluate_every=0"]
    process = subprocess.Popen(
        tiny.command(*words, "--steps", "100000", "--threads", "1", "--quiet", "--run", str(run)),
        env=tiny.environment(), stderr=subprocess.PIPE, text=True, preexec_fn=listening,
        start_new_session=True,
    )  # fmt: skip
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert said == f"panoply: stopped; go on with panoply train --resume {run}\n"
    opened = Run.open(run)
    assert opened.status() == "stopped"
    newest = opened.latest()
    assert newest is not None
    assert newest.step == len(opened.metrics()) > 1
    assert all(c.problem() is None for c in checkpoint.listed(opened.checkpoints))
    assert not list(opened.checkpoints.glob(".writing*"))
    for _ in range(100):
        if not alive(process.pid):
            return
        time.sleep(0.1)
    raise AssertionError("some process of its group is left")


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_part_that_calls_sys_exit_does_not_pass_for_success(
    tmp_path: Path, registries: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "leaving.py").write_text(
        "import panoply as pp, sys, torch\n"
        "@pp.part('reward')\n"
        "def leaving(experience: pp.Experience) -> torch.Tensor:\n"
        "    sys.exit(0)\n"
    )
    settings = {k: v for k, v in tiny.SETTINGS.items() if k != "reward.name"}
    words = [w for k, v in settings.items() for w in ("--set", f"{k}={v}")]
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "grpo", "--reward", "leaving", "--plugin", str(tmp_path / "leaving.py"), *words,
                  "--model", "fresh", "--run", str(tmp_path / "run"), "--quiet"])  # fmt: skip
    assert ended.value.code == 2
    assert "was left by sys.exit(0)" in capsys.readouterr().err


def test_a_plug_in_that_calls_sys_exit(tmp_path: Path) -> None:
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(pp.PanoplyError, match="cannot be loaded: SystemExit: 0"):
        pp.plan("grpo", plugins=[str(tmp_path / "leaving.py")])
