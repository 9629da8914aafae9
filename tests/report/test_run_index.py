"""The index reads what is below its folder, and nothing else."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import numpy as np
import pytest

from panoply.report.curves import Experiment, curve
from panoply.report.run_index import NoSuchRun, RunIndex, group_of

PLAN = {"method": {"id": "grpo@1"}, "world": {"id": "chain@1"}, "run": {"seed": 4, "steps": 9}}


def shelve(root: Path, name: str, plan: dict | None = None) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"plan": plan or PLAN}))
    return folder


def test_runs_are_found_below_folders_and_hidden_ones_when_asked(tmp_path: Path) -> None:
    for name in ("a", "study/01-sft", ".cache/x", "a/inside"):
        shelve(tmp_path, name)
    (tmp_path / "foreign" / "deep").mkdir(parents=True)
    index = RunIndex(tmp_path)
    assert index.find() == ["a", "study/01-sft"]
    assert index.find(cached=True) == [".cache/x", "a", "study/01-sft"]
    assert index.strangers() == ["foreign"]


def test_status(tmp_path: Path) -> None:
    folder = shelve(tmp_path, "a")
    index = RunIndex(tmp_path)
    assert index.facts("a")["status"] == "stopped"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "metrics.jsonl").write_text(
            '{"step": 1, "held_out_greedy": 0.5}\n{"step": 2, "reward": 1}\n'
        )
        facts = index.facts("a")
        assert (facts["status"], facts["step"], facts["after"]) == ("running", 2, 0.5)
    (folder / "result.json").write_text('{"diverged": "Stopped: loss is nan", "steps": 1}')
    facts = index.facts("a")
    assert (facts["status"], facts["why"]) == ("diverged", "Stopped: loss is nan")


def test_a_change_is_seen_at_once(tmp_path: Path) -> None:
    folder = shelve(tmp_path, "a")
    index = RunIndex(tmp_path)
    assert index.facts("a")["after"] is None
    (folder / "result.json").write_text(
        '{"after": {"greedy": 0.1, "greedy_interval": [0, 1], "sampled": 0.3, "n": 4}}'
    )
    assert (index.facts("a")["after"], index.facts("a")["measured"]) == (0.1, "success")
    (folder / "result.json").write_text(
        '{"after": {"of": "return", "greedy": 212, "greedy_interval": [150, 285]}}'
    )
    assert (index.facts("a")["after"], index.facts("a")["measured"]) == (212, "return")


def test_curves_begin_with_what_was_measured_before(tmp_path: Path) -> None:
    folder = shelve(tmp_path, "a")
    (folder / "metrics.jsonl").write_text('{"step": 1, "held_out_greedy": 0.5}\n')
    (folder / "result.json").write_text('{"before": {"greedy": 0.1, "problems": 8}}')
    assert RunIndex(tmp_path).metrics("a")[0] == {"step": 0, "seconds": 0.0, "held_out_greedy": 0.1}


def test_links_and_odd_files_are_not_followed(tmp_path: Path) -> None:
    outside = shelve(tmp_path, "outside")
    root = tmp_path / "runs"
    good = shelve(root, "a")
    (root / "b").symlink_to(outside)
    (good / "metrics.jsonl").symlink_to(outside / "run.json")
    os.mkfifo(good / "episodes.jsonl")
    index = RunIndex(root)
    assert index.find() == ["a"]
    for run, name in (
        ("b", "run.json"),
        ("a", "metrics.jsonl"),
        ("a", "episodes.jsonl"),
        ("../outside", "run.json"),
    ):
        with pytest.raises(NoSuchRun):
            index.open(run, name)
    assert index.facts("a")["status"] == "stopped"


def test_a_shelf_that_is_itself_a_link_is_the_folder_meant(tmp_path: Path) -> None:
    shelve(tmp_path / "real", "a")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert RunIndex(tmp_path / "link").find() == ["a"]


def test_only_the_seed_may_differ_within_a_group() -> None:
    other = {**PLAN, "run": {**PLAN["run"], "seed": 5, "threads": 2}}
    assert group_of(PLAN) == group_of(other)
    assert group_of(PLAN) != group_of({**PLAN, "run": {"seed": 4, "steps": 10}})


DEEP = "[" * 100_000 + "]" * 100_000
NESTED = '{"a":' * 400 + "1" + "}" * 400
BAD = {
    "deep": {"run.json": DEEP},
    "nested": {"run.json": f'{{"plan": {NESTED}}}'},
    "bytes": {"run.json": b'{"plan": "\xff"}'},
    "wrong": {"run.json": '{"plan": {"run": [1], "method": 3, "world": {"id": [1]}}, "created": {"a": 1}}'},
    "infinite": {
        "run.json": '{"plan": {"run": {"seed": Infinity, "steps": 1e999}}}',
        "result.json": '{"before": {"x": NaN, "x_interval": 1}, "after": [], "steps": "many", "diverged": [1]}',
        "metrics.jsonl": '{"step": 1, "reward": NaN, "held_out_x": Infinity, "huge": 1' + "0" * 400 + "}\n",
    },
    "rows": {
        "run.json": '{"plan": {}}',
        "metrics.jsonl": '{"step": "one", "seconds": [], "decisions": {}}\n' + DEEP + "\n",
        "result.json": DEEP,
    },
}


def test_a_bad_run_is_listed_and_harms_no_other(tmp_path: Path) -> None:
    shelve(tmp_path, "good")
    for name, files in BAD.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    index = RunIndex(tmp_path)
    found = {facts["id"]: facts for facts in index.all_facts()}
    assert set(found) == {"good", *BAD}
    assert found["good"]["method"] == "grpo@1"
    unreadable = {name: facts["problem"] for name, facts in found.items() if "problem" in facts}
    says = {
        "deep": "is nested too deep",
        "nested": "is nested too deep",
        "bytes": "is not text in UTF-8",
        "wrong": "is of a shape that Panoply does not write",
    }
    assert set(unreadable) == set(says)
    for name, why in says.items():
        assert unreadable[name].startswith(f"run.json of '{name}' {why}")
    json.dumps(found, allow_nan=False)
    infinite = found["infinite"]
    numbers = ("seed", "of", "before", "after", "reward")
    assert {name: infinite[name] for name in numbers} == dict.fromkeys(numbers)
    assert (infinite["step"], infinite["metrics"]) == (1, ["step"])
    for x in ("step", "seconds", "decisions"):
        for name in ("infinite", "rows"):
            drawn = curve(Experiment(name, (name,), (index.metrics(name),)), "huge", x)
            assert not np.isfinite(drawn.mean).any()
