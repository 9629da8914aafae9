"""A run's identity is everything that determines its numbers, and nothing else."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny

import panoply as pp
from panoply import training
from panoply.evidence import cache, closure, worker
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


def changed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    read = cache.file_hash
    monkeypatch.setattr(cache, "file_hash", lambda path: "changed" if path.name == name else read(path))


@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("learner.py", "both"),  # a loop
        ("scoring.py", "both"),  # imported by what is imported
        ("chain.py", "both"),  # the world
        ("text.py", "both"),  # the kind of world, which is found by its name
        ("anchors.py", "gigpo"),  # a slot's file that one of them has a part of
        ("igpo.py", "neither"),  # another method
        ("tools.py", "neither"),  # another world
        ("bellman.py", "neither"),  # parts that none of them has
        ("progress.py", "neither"),  # only shows
    ],
)
def test_the_code_that_computes_is_part_of_it(file: str, stale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.identity(planned("gigpo")), cache.identity(planned())
    changed(monkeypatch, file)
    after = cache.identity(planned("gigpo")), cache.identity(planned())
    moved = [now != then for now, then in zip(after, before, strict=True)]
    assert moved == {"both": [True, True], "gigpo": [True, False], "neither": [False, False]}[stale]


@pytest.mark.parametrize(
    ("world", "method", "file"),
    [("logged:pendulum-mixed", "iql", "pendulum.py"), ("mixed", "grpo", "manyanswers.py")],
)
def test_the_worlds_that_a_world_is_made_of_count(
    world: str, method: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pp.plan(method, world)
    before = cache.identity(made)
    changed(monkeypatch, file)
    assert cache.identity(made) != before


def test_imports_inside_functions_count_and_those_for_types_do_not() -> None:
    assert "panoply.policies.text" in closure.imports("panoply.policies.build")
    inside = closure.imports("panoply.evidence.closure")
    assert inside == frozenset(), "what is silent has no source here"
    assert "panoply.evidence.claims" not in closure.imports("panoply.registry")
    assert closure.PACKAGE / "kernels" / "host.py" in closure.closure(["panoply.policies.text"])


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


@pytest.mark.parametrize(("spoil", "text"), [("run.json", "{"), ("metrics.jsonl", "")])
def test_a_broken_one_is_removed_and_named(finished: Path, spoil: str, text: str) -> None:
    (finished / spoil).write_text(text)
    said = cache.tidy(finished)
    assert said is not None
    assert "run is broken and is made again" in said
    assert not finished.exists()


@pytest.mark.parametrize("ended", [None, {"steps": 2}], ids=["no end", "a broken end"])
def test_one_that_can_be_resumed_stays(finished: Path, ended: dict[str, Any] | None) -> None:
    if ended is None:
        (finished / "result.json").unlink()
    else:
        (finished / "result.json").write_text(json.dumps(ended))
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


def test_two_workers_that_begin_the_same_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds it finished; it neither trains again nor says that the folder is taken."""
    folder, begun = tmp_path / "same", threading.Event()
    train, trained = training.train, []
    order = (planned().to_json(), folder, (), worker.News(io.StringIO()))
    second = threading.Thread(target=worker.carry_out, args=order)

    def slowly(*given: Any, **more: Any) -> Any:
        trained.append(more)
        if not begun.is_set():
            begun.set()
            second.start()
            second.join(timeout=0.5)  # long enough to get in the way, if it could
        return train(*given, **more)

    monkeypatch.setattr("panoply.api.train", slowly)
    worker.carry_out(*order)
    second.join()
    assert len(trained) == 1
    assert cache.finished(folder) is not None
