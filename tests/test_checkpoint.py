"""Checkpoints are whole or absent: cut, flipped, refused by the disk, or overtaken, no finished one is lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from fuzz_inputs import reseal

import panoply as pp
from panoply import checkpoint
from panoply.checkpoint import Checkpoint, DiskError, check_counts
from panoply.files import BadFile
from panoply.records import Best, State
from panoply.run import Run

Stopped = tuple[Path, pp.Trained]


def write_model(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model/weights").write_bytes(b"0123456789" * 20)


def state(step: int) -> State:
    best: Best = {"step": 0, "of": "success", "score": 0.0}
    return State(step=step, seconds=0.0, parts={}, best=best, before={}, after={}, threads=1, norm=1.0)


def save(folder: Path, step: int) -> Checkpoint:
    return checkpoint.save(folder, step, write_model, state(step), {"a": torch.full((3,), float(step))})


class TestFolder:
    def test_holds_what_was_saved(self, tmp_path: Path) -> None:
        found = save(tmp_path, 3)
        assert found.problem() is None
        assert found.step == 3
        assert found.state() == state(3)
        assert found.tensors()["a"].tolist() == [3.0, 3.0, 3.0]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000003"]

    @pytest.mark.parametrize("name", ["model/weights", "state.safetensors", "state.json", "manifest.json"])
    def test_a_file_cut_short_is_noticed(self, name: str, tmp_path: Path) -> None:
        found = save(tmp_path, 1)
        file = found.folder / name
        file.write_bytes(file.read_bytes()[:-5])
        problem = found.problem()
        assert problem is not None
        assert ("cut short" in problem) == (name != "manifest.json")

    @pytest.mark.parametrize("name", ["model/weights", "state.safetensors", "state.json"])
    def test_a_flipped_bit_is_noticed(self, name: str, tmp_path: Path) -> None:
        found = save(tmp_path, 1)
        content = bytearray((found.folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (found.folder / name).write_bytes(content)
        assert found.problem() == f"{name} is corrupt"

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"files": 3}', '{"files": {"a": 1}}'])
    def test_a_strange_manifest_is_noticed(self, text: str, tmp_path: Path) -> None:
        found = save(tmp_path, 1)
        (found.folder / "manifest.json").write_text(text)
        assert found.problem() == "it has no readable manifest"

    def test_a_missing_file_is_noticed(self, tmp_path: Path) -> None:
        found = save(tmp_path, 1)
        (found.folder / "model/weights").unlink()
        assert found.problem() == "model/weights is missing"

    def test_the_newest_whole_one_is_found(self, tmp_path: Path) -> None:
        for step in (1, 2, 3):
            save(tmp_path, step)
        (tmp_path / "step-0000003/state.json").write_text("")
        said: list[str] = []
        found = checkpoint.latest_usable(tmp_path, said.append)
        assert found is not None
        assert found.step == 2
        assert len(said) == 1
        assert "step-0000003 is not usable: state.json is cut short" in said[0]

    def test_other_folders_are_not_checkpoints(self, tmp_path: Path) -> None:
        save(tmp_path, 12)
        for name in ("step-x", ".writing-0000013-1", "broken-0000014"):
            (tmp_path / name).mkdir()
        assert [c.step for c in checkpoint.listed(tmp_path)] == [12]

    @pytest.mark.parametrize(
        ("keep", "best", "left"), [(1, None, [5]), (2, 1, [1, 4, 5]), (2, 5, [4, 5]), (9, 1, [1, 2, 3, 4, 5])]
    )
    def test_the_last_ones_and_the_best_are_kept(
        self, keep: int, best: int, left: list[int], tmp_path: Path
    ) -> None:
        for step in range(1, 6):
            save(tmp_path, step)
        (tmp_path / ".writing-0000009-77").mkdir()
        checkpoint.prune(tmp_path, keep, best)
        assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{s:07d}" for s in left]

    def test_writing_one_again_replaces_it_in_one_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At every rename there is a whole checkpoint, under its own name or the one it retired to."""
        save(tmp_path, 1)
        replace = os.replace

        def look(source: Path, target: Path) -> None:
            names = [p for p in tmp_path.iterdir() if not p.name.startswith(".writing")]
            whole = [p for p in names if Checkpoint(p).problem() is None]
            assert whole
            replace(source, target)

        monkeypatch.setattr(os, "replace", look)
        assert save(tmp_path, 1).problem() is None
        checkpoint.prune(tmp_path, 1, None)
        assert [p.name for p in tmp_path.iterdir()] == ["step-0000001"]

    def test_a_text_is_replaced_whole_or_not_at_all(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "a.json"
        checkpoint.write_atomically(file, "old")

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(DiskError, match=r"a\.json: the disk is full"):
            checkpoint.write_atomically(file, "new")
        assert file.read_text() == "old"
        assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """A finished run of nine steps, and a copy of it that looks as if it had been stopped after the last checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    done = tiny.train(folder / "whole", steps=9, settings={"run.checkpoint_every": 3, "run.keep": 5})
    shutil.copytree(folder / "whole", folder / "stopped")
    (folder / "stopped/result.json").unlink()
    return folder / "stopped", done


@pytest.fixture
def run(stopped: Stopped, tmp_path: Path) -> Path:
    shutil.copytree(stopped[0], tmp_path / "run")
    return tmp_path / "run"


def damage(run: Path, step: int) -> None:
    file = run / f"checkpoints/step-{step:07d}/model/model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


class TestResume:
    def test_a_writer_killed_between_the_old_and_the_new_checkpoint(self, run: Path) -> None:
        folder = run / "checkpoints"
        (folder / "step-0000009").rename(folder / ".retired-step-0000009-77")
        for step in (0, 3, 6):
            shutil.rmtree(folder / f"step-{step:07d}")
        notes = tiny.Notes()
        tiny.resume(run, notes)
        assert notes.said == [f"Resuming {run} at step 9 of 9."]

    def test_a_broken_checkpoint_falls_back_to_the_one_before(self, run: Path, stopped: Stopped) -> None:
        damage(run, 9)
        notes = tiny.Notes()
        done = tiny.resume(run, notes)
        assert "step-0000009 is not usable: model/model.safetensors is cut short" in notes.said[0]
        assert "at step 6 of 9" in notes.said[1]
        assert done.fingerprint == stopped[1].fingerprint
        assert [m["step"] for m in tiny.metrics(run)] == list(range(1, 10))
        assert (run / "checkpoints/broken-0000009").is_dir()
        assert tiny.checkpoints(run) == [0, 3, 6, 9]

    def test_a_broken_one_is_not_counted_among_those_kept(self, run: Path) -> None:
        """Otherwise, with one kept, each new checkpoint would be removed in favour of the broken one."""
        config = json.loads((run / "run.json").read_text())
        config["plan"]["run"] |= {"keep": 1, "checkpoint_every": 1}
        (run / "run.json").write_text(json.dumps(config))
        damage(run, 9)
        damage(run, 6)

        class Looking(tiny.Notes):
            def step(self, job: object, record: object, experience: object) -> None:
                assert Run.open(run).latest() is not None

        tiny.resume(run, Looking())

    def test_when_all_are_broken_nothing_is_touched(self, run: Path) -> None:
        """Starting over would spend the whole budget again and prune what might still be rescued: that is refused."""
        for step in (0, 3, 6, 9):
            damage(run, step)
        before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
        with pytest.raises(pp.PanoplyError, match=r"No checkpoint of .* is usable"):
            tiny.resume(run)
        assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before

    def test_without_any_checkpoint_it_starts_at_the_beginning(self, run: Path, stopped: Stopped) -> None:
        shutil.rmtree(run / "checkpoints")
        (run / "checkpoints").mkdir()
        assert tiny.resume(run).fingerprint == stopped[1].fingerprint

    def test_the_model_a_run_began_with_may_be_gone(self, stopped: Stopped, tmp_path: Path) -> None:
        model = pp.export(stopped[1].run, tmp_path / "model")
        whole = tiny.train(tmp_path / "whole", model=str(model))
        shutil.copytree(tmp_path / "whole", tmp_path / "run")
        (tmp_path / "run/result.json").unlink()
        shutil.rmtree(tmp_path / "run/checkpoints/step-0000004")
        shutil.rmtree(model)
        assert tiny.resume(tmp_path / "run").fingerprint == whole.fingerprint

    def test_the_folder_of_a_model_is_stored_whole(
        self, stopped: Stopped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pp.export(stopped[1].run, tmp_path / "model")
        monkeypatch.chdir(tmp_path)
        done = tiny.train(Path("run"), model="model", steps=1)
        monkeypatch.chdir("/")
        assert Run.open(tmp_path / done.run).plan().options.model == str(tmp_path / "model")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB, where one may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and os.geteuid() == 0
    if (
        not mounted
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], capture_output=True
        ).returncode
    ):
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    """Leave no room, and return the file that takes it."""
    file = folder / "ballast"
    with open(file, "wb", buffering=0) as ballast, contextlib.suppress(OSError):
        while True:
            ballast.write(bytes(1 << 12))
    return file


class Filling(tiny.Notes):
    """Fills the disk after a step."""

    def __init__(self, folder: Path, after: int):
        super().__init__()
        self.folder, self.after = folder, after

    def step(self, job: object, record: dict[str, int], experience: object) -> None:  # type: ignore[override]
        if record["step"] == self.after:
            fill(self.folder)


class TestFullDisk:
    @pytest.mark.parametrize("after", [1, 3, 5])
    def test_a_run_stops_keeps_its_checkpoints_and_goes_on(
        self, after: int, small_disk: Path, stopped: Stopped
    ) -> None:
        run = small_disk / "run"
        settings = {"run.checkpoint_every": 3, "run.keep": 5}
        with pytest.raises(DiskError, match=r"the disk is full\. Finished checkpoints are untouched\."):
            tiny.train(run, steps=9, settings=settings, progress=Filling(small_disk, after))
        kept = tiny.checkpoints(run)
        assert kept == [0, 3][: 1 + after // 3]
        assert all(Checkpoint(run / f"checkpoints/step-{s:07d}").problem() is None for s in kept)
        (small_disk / "ballast").unlink()
        assert tiny.resume(run).fingerprint == stopped[1].fingerprint
        assert [m["step"] for m in tiny.metrics(run)] == list(range(1, 10))

    def test_the_command_says_so_in_one_sentence(self, small_disk: Path) -> None:
        fill(small_disk)
        done = tiny.shell(
            "train",
            "grpo",
            "--model",
            "fresh",
            *tiny.words(),
            "--run",
            str(small_disk / "run"),
            "--steps",
            "2",
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert "the disk is full" in done.stderr

    def test_wherever_writing_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also without a file system to fill: the write of the second checkpoint fails at each of its steps in turn."""
        flush, calls = checkpoint._flush, 0

        def failing(path: Path) -> None:
            nonlocal calls
            calls += 1
            if calls > 12:
                raise OSError(errno.ENOSPC, "No space left on device")
            flush(path)

        monkeypatch.setattr(checkpoint, "_flush", failing)
        with pytest.raises(DiskError, match="the disk is full"):
            tiny.train(tmp_path / "run", settings={"run.checkpoint_every": 1})
        monkeypatch.undo()
        kept = tiny.checkpoints(tmp_path / "run")
        assert kept
        assert all(Checkpoint(tmp_path / f"run/checkpoints/step-{s:07d}").problem() is None for s in kept)
        assert not list((tmp_path / "run/checkpoints").glob(".*"))
        assert tiny.resume(tmp_path / "run").after["step"] == 4


@pytest.mark.parametrize("told", [float("-inf"), float("nan"), 1.0, -1, True, 2**62])
def test_what_is_counted_is_a_number_of_things(told: Any) -> None:
    """`arange` from −∞, which a spoilt and sealed state asked for, ended in a traceback."""
    first = {"tasks": 0, "order": [1, 2]}
    check_counts("collector", {"tasks": 12, "order": []}, first)
    with pytest.raises(BadFile, match="tasks of collector is a count, and cannot be"):
        check_counts("collector", {"tasks": told, "order": []}, first)


def test_a_run_does_not_go_on_from_counts_that_are_none(run: Path) -> None:
    newest = run / "checkpoints/step-0000009"
    told = json.loads((newest / "state.json").read_text())
    told["parts"]["collector"]["episodes"] = -1
    (newest / "state.json").write_text(json.dumps(told))
    reseal(newest)
    with pytest.raises(pp.PanoplyError, match="episodes of collector is a count, and cannot be -1"):
        tiny.resume(run)
