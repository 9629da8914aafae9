"""A run in the user's hands: step by step, stopped early, left and resumed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import panoply as pp
from panoply.progress import Progress
from panoply.run import Run


def tiny_steps(folder: Path, progress: Progress | None = None, **choices: Any) -> pp.Steps:
    settings = tiny.SETTINGS | choices.pop("settings", {})
    plain = {"model": "fresh", "steps": 4, "threads": 1, **choices}
    return pp.steps("grpo", run=folder, settings=settings, progress=progress or Progress(), **plain)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pp.Trained:
    return tiny.train(tmp_path_factory.mktemp("handle") / "run")


def test_steps_are_those_of_train(tmp_path: Path, whole: pp.Trained) -> None:
    steps = tiny_steps(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(pp.PanoplyError, match="has not ended"):
        steps.result  # noqa: B018
    seen = []
    for step in steps:
        assert steps.run == step.run == tmp_path / "run"
        assert len(step.experience) == step.metrics["decisions"]
        assert "advantage" in step.experience
        seen.append((step.number, step.of))
        assert repr(step).startswith(f"step {step.number}/4  ")
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert steps.result.fingerprint == whole.fingerprint
    assert [tiny.untimed(r) for r in tiny.metrics(steps.result.run)] == tiny.metrics(whole.run)
    assert list(steps) == []
    assert steps.result.run == tmp_path / "run"


def test_the_plan_is_checked_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(pp.PanoplyError, match="Unknown method 'grop'"):
        pp.steps("grop")
    with pytest.raises(pp.PanoplyError, match="There is no run folder"):
        pp.steps(resume=tmp_path / "none")


def test_stop_finishes_the_run_early(tmp_path: Path) -> None:
    notes = tiny.Notes()
    steps = tiny_steps(tmp_path / "run", notes)
    for step in steps:
        if step.number == 2:
            step.stop()
    assert Run.open(tmp_path / "run").status() == "finished"
    assert notes.said == ["Stopped at step 2 of 4: the run is finished."]
    assert tiny.result(tmp_path / "run")["steps"] == 2
    assert steps.result.after["step"] == 2
    assert tiny.checkpoints(tmp_path / "run") == [0, 2]


def test_on_step_sees_the_same_and_may_stop(tmp_path: Path) -> None:
    seen = []

    def look(step: pp.Step) -> None:
        seen.append((step.number, len(step.experience), step.policy.fingerprint()))
        if step.number == 3:
            step.stop()

    done = tiny.train(tmp_path / "run", on_step=look)
    assert [n for n, *_ in seen] == [1, 2, 3]
    assert len({policy for *_, policy in seen}) == 3
    assert seen[-1][-1] == done.fingerprint


@pytest.mark.parametrize("how", ["break", "raise", "forget", "with"])
def test_a_loop_that_is_left_can_be_resumed_to_the_same_end(
    how: str, tmp_path: Path, whole: pp.Trained
) -> None:
    notes = tiny.Notes()

    def leave() -> None:
        if how == "with":
            with tiny_steps(tmp_path / "run", notes) as steps:
                next(steps)
                next(steps)
            return
        for step in tiny_steps(tmp_path / "run", notes):
            if step.number == 2:
                if how == "raise":
                    raise ZeroDivisionError
                break

    if how == "raise":
        with pytest.raises(ZeroDivisionError):
            leave()
    elif how == "forget":
        steps = tiny_steps(tmp_path / "run", notes)
        next(steps)
        next(steps)
        del steps
    else:
        leave()
    gc.collect()
    assert notes.said == [f"Left at step 2 of 4; go on with panoply train --resume {tmp_path / 'run'}"]
    run = Run.open(tmp_path / "run")
    assert run.status() == "stopped"
    assert tiny.checkpoints(run.folder) == [0, 2]
    assert tiny.resume(run.folder).fingerprint == whole.fingerprint


def test_what_on_step_raises_passes_and_the_run_can_go_on(tmp_path: Path, whole: pp.Trained) -> None:
    def fail(step: pp.Step) -> None:
        if step.number == 3:
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        tiny.train(tmp_path / "run", on_step=fail)
    assert Run.open(tmp_path / "run").status() == "stopped"
    assert tiny.resume(tmp_path / "run").fingerprint == whole.fingerprint


def test_what_a_run_raises_passes_through_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from panoply.loops import on_policy

    def fail(*_: Any) -> None:
        raise pp.PanoplyError("No.")

    steps = tiny_steps(tmp_path / "run")
    next(steps)
    monkeypatch.setattr(on_policy, "learn", fail)
    with pytest.raises(pp.PanoplyError, match="No"):
        next(steps)
    assert Run.open(tmp_path / "run").status() == "stopped"


def test_two_runs_side_by_side_do_not_disturb_each_other(
    tmp_path: Path, whole: pp.Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each computes with its own threads, and whoever looks at them between steps with theirs."""
    threads = [5]
    monkeypatch.setattr(torch, "set_num_threads", lambda number: threads.__setitem__(0, number))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    seen: dict[str, set[int]] = {"one": set(), "two": set(), "between": set()}

    class Looking(Progress):
        def step(self, job: Any, record: Any, experience: Any) -> None:
            seen[job.run.folder.name].add(threads[0])

    one = tiny_steps(tmp_path / "one", Looking())
    two = tiny_steps(tmp_path / "two", Looking(), threads=3)
    for _ in zip(one, two, strict=True):
        seen["between"].add(threads[0])
    assert seen == {"one": {1}, "two": {3}, "between": {5}}
    assert one.result.fingerprint == whole.fingerprint


def test_time_spent_looking_is_not_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    now = time.monotonic
    away = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now() + away[0])
    for _ in tiny_steps(tmp_path / "run"):
        away[0] += 1000.0
    assert tiny.result(tmp_path / "run")["seconds"] < 500


def test_the_steps_of_a_recipe_follow_one_another_and_stop_ends_a_stage(tmp_path: Path) -> None:
    batches = {"imitate.data.batch": 4, "judge.data.batch": 4, "optimise.sample.prompts": 2}
    choices: Any = {"settings": {"run.held_out": 4, **batches}, "threads": 1, "progress": Progress()}
    steps = pp.steps("rlhf", run=tmp_path / "all", **choices)
    folders = []
    for step in steps:
        step.stop()
        folders.append(step.run.name)
    assert folders == ["01-imitate", "02-judge", "03-optimise"]
    assert steps.result.run.name == folders[-1]
