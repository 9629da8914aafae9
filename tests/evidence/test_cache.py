"""A run's identity is everything that determines its numbers, and nothing else."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import tiny

import panoply as pp
from panoply.evidence import cache, worker
from panoply.planning import Plan
from panoply.run import Run

GRPO = {"world.operations": 2, "run.held_out": 8}


def planned(method: str = "grpo", seed: int = 0, **settings: Any) -> Plan:
    return pp.plan(method, "chain", seed=seed, steps=3, threads=1, settings={**GRPO, **settings})


@pytest.mark.parametrize(
    "other",
    [
        planned(seed=1),
        planned("rloo"),
        planned(**{"update.lr": 1e-4}),
        planned(**{"world.operations": 3}),
        planned(**{"run.held_out": 9}),
    ],
    ids=["seed", "method", "setting", "world", "held out"],
)
def test_what_changes_a_run_changes_its_identity(other: Plan) -> None:
    assert cache.identity(other) != cache.identity(planned())


def test_what_does_not_change_a_run_does_not() -> None:
    assert cache.identity(planned()) == cache.identity(planned(**{"run.keep": 7, "run.checkpoint_every": 2}))
    spelled_out = planned(**{"update.lr": planned().method.settings()["update.lr"]})
    assert cache.identity(planned()) == cache.identity(spelled_out)


def test_the_code_that_computes_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.identity(planned("gigpo")), cache.identity(planned())
    read = cache._file
    monkeypatch.setattr(cache, "_file", lambda path: "changed" if path.name == "anchors.py" else read(path))
    cache._core.cache_clear()
    try:
        assert cache.identity(planned()) != before[1], "slots are shared by all runs"
        monkeypatch.setattr(cache, "_file", lambda path: "changed" if path.name == "igpo.py" else read(path))
        cache._core.cache_clear()
        assert (cache.identity(planned("gigpo")), cache.identity(planned())) == before, (
            "another method's file"
        )
        monkeypatch.setattr(cache, "_file", lambda path: "changed" if path.name == "chain.py" else read(path))
        assert cache.identity(planned()) != before[1], "the world's own file"
    finally:
        monkeypatch.undo()
        cache._core.cache_clear()


def test_a_plugin_counts_by_what_is_in_it(tmp_path: Path, registries: None) -> None:
    source = (
        "import panoply as pp\n\n"
        "@pp.part('credit', equation='A = R')\ndef plain(experience):\n    return experience['reward']\n"
    )
    (tmp_path / "own.py").write_text(source)
    made = pp.plan("grpo", "chain", credit="plain", plugins=[str(tmp_path / "own.py")])
    before = cache.identity(made)
    (tmp_path / "own.py").write_text(source + "# changed\n")
    assert cache.identity(made) != before


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    return tiny.train(tmp_path / "run", steps=2).run


def test_a_finished_run_is_found(finished: Path) -> None:
    assert cache.tidy(finished) is None
    found = cache.finished(finished)
    assert found is not None
    assert found.folder == finished


@pytest.mark.parametrize("spoil", ["run.json", "result.json", "metrics.jsonl"])
def test_a_broken_one_is_removed_and_named(finished: Path, spoil: str) -> None:
    text = {"run.json": "{", "result.json": json.dumps({"steps": 2}), "metrics.jsonl": ""}[spoil]
    (finished / spoil).write_text(text)
    said = cache.tidy(finished)
    assert said is not None
    assert "run is broken and is made again" in said
    assert not finished.exists()


def test_one_that_can_be_resumed_stays(finished: Path) -> None:
    (finished / "result.json").unlink()
    assert cache.tidy(finished) is None
    assert cache.finished(finished) is None
    assert (finished / "run.json").is_file()


def test_one_that_another_process_is_making_is_left_alone(tmp_path: Path) -> None:
    run = Run.create(planned(), tmp_path / "run")
    try:
        assert cache.tidy(run.folder) is None
        assert (run.folder / "run.json").is_file()
    finally:
        run.release()
    assert cache.tidy(run.folder) is None, "nothing was lost"
    assert not run.folder.exists(), "it had not come to a checkpoint"


def test_a_worker_waits_for_it(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = (finished / "result.json").read_text()
    (finished / "result.json").unlink()
    other = Run.open(finished)
    other.acquire()
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        (finished / "result.json").write_text(result)
        other.release()

    monkeypatch.setattr("time.sleep", sleep)
    worker.carry_out({}, finished, (), worker.News(io.StringIO()))
    assert len(waited) == 1
