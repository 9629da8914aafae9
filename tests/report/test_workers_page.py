"""Lanes of workers, also from files in a bad state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from panoply.report import workers
from panoply.report.run_index import RunIndex
from panoply.report.workers import Workers


def line(step: int, worker: str = "sampler-0", **more: Any) -> dict[str, Any]:
    role = worker.split("-")[0]
    said = {"busy": 3.0, "wait": 1.0, "tokens": 100, "memory_mb": 10.0, "version": step - 1, "restarts": 0}
    return {"step": step, "worker": worker, "role": role, "node": "here", **said, **more}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"plan": {"run": {}}}))
    return folder


def told(run: Path, *lines: Any) -> dict[str, Any]:
    text = "".join(json.dumps(said) + "\n" for said in lines)
    (run / "workers.jsonl").write_text(text)
    return Workers(RunIndex(run.parent), run.name).to_json()


def test_a_lane_a_worker_with_learners_first_and_numbers_in_their_order(run: Path) -> None:
    found = told(
        run, line(1, "sampler-10"), line(1, "sampler-9"), line(1, "learner-0", busy=1.0), line(2, "sampler-9")
    )
    assert [lane["worker"] for lane in found["lanes"]] == ["learner-0", "sampler-9", "sampler-10"]
    assert found["columns"] == [[1, 1], [2, 2]]
    assert found["longest"] == [4.0, 4.0]
    late = found["lanes"][2]
    assert late["busy"] == [3.0, None]
    assert late["version"] == [0, None]
    assert found["lag"] is None


def test_many_steps_are_put_together(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "COLUMNS", 2)
    found = told(run, *(line(s, tokens=10 * s, restarts=int(s > 2), memory_mb=9.0 - s) for s in range(1, 6)))
    assert found["columns"] == [[1, 3], [4, 5]]
    lane = found["lanes"][0]
    assert lane["tokens"] == [60, 90]  # summed
    assert lane["busy"] == [9.0, 6.0]
    assert (lane["version"], lane["restarts"], lane["memory_mb"]) == (
        [2, 4],
        [1, 1],
        [8.0, 5.0],
    )  # the largest
    assert found["longest"] == [12.0, 8.0]


def test_what_was_said_last_of_a_step_holds(run: Path) -> None:
    found = told(run, line(1, busy=2.0), line(2), line(1, busy=7.0))
    assert found["lanes"][0]["busy"] == [7.0, 3.0]


def test_a_running_run_is_read_on_from_where_it_was_and_anew_when_it_was_cut(run: Path) -> None:
    index = Workers(RunIndex(run.parent), run.name)
    assert index.to_json()["lanes"] == []
    file = run / "workers.jsonl"
    file.write_text(json.dumps(line(1)) + "\n" + json.dumps(line(2))[:20])
    assert index.to_json()["columns"] == [[1, 1]]  # a line that is being written is not there yet
    file.write_text(json.dumps(line(1)) + "\n" + json.dumps(line(2)) + "\n")
    assert index.to_json()["columns"] == [[1, 1], [2, 2]]
    file.write_text(json.dumps(line(1, busy=8.0)) + "\n")
    assert index.to_json()["lanes"][0]["busy"] == [8.0]


def test_lines_that_say_nothing_of_a_worker_are_counted(run: Path) -> None:
    bad = [{"step": "x", "worker": "a"}, {"step": 1}, {"step": 1, "worker": 3}, {"step": -1, "worker": "a"}]
    found = told(run, *bad, line(1, busy="long", wait=None, tokens=True, version=1e300))
    assert found["unreadable"] == 4
    lane = found["lanes"][0]
    assert [lane[name] for name in ("busy", "wait", "tokens", "version")] == [[None]] * 4
    assert found["longest"] == [0.0]
    (run / "workers.jsonl").write_bytes(b"\xff\xfe\n[]\n{}\n")
    assert Workers(RunIndex(run.parent), run.name).to_json()["unreadable"] == 3


def test_the_lag_is_a_band(run: Path) -> None:
    rows = [
        {"step": 1, "lag": 0.0},
        {"step": 2},
        {"step": 3, "lag": 1.5, "lag_1": 0.5, "lag_2": 0.5, "lag_max": 2},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lag = told(run, line(1))["lag"]
    assert (lag["x"], lag["mean"], lag["low"], lag["high"]) == ([1, 3], [0.0, 1.5], [0.0, 1], [0.0, 2])


def test_more_workers_than_can_be_drawn_are_counted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "MOST", 2)
    found = told(run, *(line(1, f"sampler-{i}") for i in range(5)))
    assert (len(found["lanes"]), found["left_out"]) == (2, 3)
