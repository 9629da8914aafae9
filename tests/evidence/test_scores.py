"""What a finished run comes to, from records written out."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny

import panoply as pp
from panoply.evidence import scores
from panoply.kinds import text
from panoply.run import Run

RECORDS: list[dict[str, Any]] = [
    {
        "step": i,
        "seconds": 0.5 * i,
        "total_episodes": 10 * i,
        "total_decisions": 100 * i,
        "calls": 2.0 * i,
        "success": 0.1 * i,
    }
    for i in range(1, 11)
]
RECORDS[4] |= {"held_out_greedy": 0.9, "held_out_sampled": 0.5}
RESULT = {
    "steps": 10, "seconds": 5.0,
    "before": {"greedy": 0.2, "greedy_interval": [0, 1], "sampled": 0.1, "sampled_interval": [0, 1], "pass@1": 0.1},
    "after": {"greedy": 1.0, "greedy_interval": [0, 1], "sampled": 0.7, "sampled_interval": [0, 1]},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = Run.create(pp.plan("grpo", "chain"), tmp_path / "run")
    for record in RECORDS:
        made.log(record)
    made.finish(RESULT)
    made.release()
    return tmp_path / "run"


def test_success_is_the_last_held_out_rate_and_its_curve(folder: Path) -> None:
    found = scores.read(folder, "success", "episodes", 100)
    assert (found.value, found.seconds, found.diverged) == (0.7, 5.0, False)
    assert found.curve == [(0.0, 0.1), (50.0, 0.5), (100.0, 0.7)]
    assert scores.read(folder, "success", "decisions", 1000).curve[1] == (500.0, 0.5)
    assert scores.read(folder, "success", "seconds", 5).curve[1] == (2.5, 0.5)


def test_the_curve_of_one_kind_of_problem_begins_at_the_start(folder: Path) -> None:
    rows = [{**row, "held_out_sampled_sums": 0.25} if row["step"] == 5 else row for row in RECORDS]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = json.loads((folder / "result.json").read_text())
    result["before"]["parts"], result["after"]["parts"] = {"sums": 0.2}, {"sums": 0.5}
    (folder / "result.json").write_text(json.dumps(result))
    found = scores.read(folder, "area:held_out_sampled_sums", "steps", 10)
    assert found.curve == [(0.0, 0.2), (5.0, 0.25), (10.0, 0.5)]
    assert found.value == pytest.approx((0.225 * 5 + 0.375 * 5) / 10)


def test_a_last_step_that_was_evaluated_is_one_point(folder: Path) -> None:
    rows = [*RECORDS[:-1], {**RECORDS[-1], "held_out_sampled": 0.7}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert scores.read(folder, "success", "steps", 10).curve == [(0.0, 0.1), (5.0, 0.5), (10.0, 0.7)]


def test_the_area(folder: Path) -> None:
    assert scores.read(folder, "area", "steps", 10).value == pytest.approx((0.3 + 0.6) / 2)


@pytest.mark.parametrize(
    ("metric", "value"),
    [("calls", 19.0), ("mean:calls", 11.0), ("success/calls", 0.05), ("calls/success", 20.0)],
)
def test_what_steps_log(folder: Path, metric: str, value: float) -> None:
    found = scores.read(folder, metric, "steps", 10)
    assert found.value == pytest.approx(value)
    assert len(found.curve) == 10


def test_a_metric_that_is_not_there(folder: Path) -> None:
    with pytest.raises(pp.PanoplyError, match="Unknown metric of run 'call'. Did you mean 'calls'"):
        scores.read(folder, "call", "steps", 10)


def test_a_run_that_diverged_counts_with_its_last_evaluation(folder: Path) -> None:
    (folder / "result.json").write_text(json.dumps({**RESULT, "diverged": "It did.", "steps": 10}))
    found = scores.read(folder, "success", "steps", 10)
    assert (found.value, found.diverged) == (0.5, True)


def test_measures_of_the_last_policy_are_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny.train(tmp_path / "run", steps=1).run
    asked = []

    def measured(world: Any, policy: Any, seed: int, k: int) -> float:
        asked.append((type(world).__name__, k))
        return 0.25

    monkeypatch.setitem(text.MEASURES, "distinct@K", measured)
    scores.measure(run, ["distinct@4"])
    scores.measure(run, ["distinct@4"])
    assert asked == [("Chain", 4)]
    assert scores.read(run, "distinct@4", "steps", 1).value == 0.25


def test_two_claims_that_share_a_run_measure_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the second to write would lose what the first has measured meanwhile."""
    run = tiny.train(tmp_path / "run", steps=1).run
    other = threading.Thread(target=scores.measure, args=(run, ["pass@2"]))

    def measured(world: Any, policy: Any, seed: int, k: int) -> float:
        other.start()
        other.join(timeout=1)
        return 0.25

    monkeypatch.setitem(text.MEASURES, "distinct@K", measured)
    scores.measure(run, ["distinct@4"])
    other.join()
    assert json.loads((run / scores.MEASURES).read_text()).keys() == {"pass@2", "distinct@4"}


def test_coverage_of_the_last_policy(tmp_path: Path) -> None:
    run = tiny.train(tmp_path / "run", steps=1).run
    scores.measure(run, ["pass@2", "distinct@2"])
    found = json.loads((run / scores.MEASURES).read_text())
    assert found.keys() == {"pass@2", "distinct@2"}
    assert all(0 <= v <= 2 for v in found.values())


@pytest.mark.parametrize(
    ("metric", "is_one"), [("pass@16", True), ("distinct@1", True), ("pass@0", False), ("pass", False)]
)
def test_which_metrics_ask_the_policy(metric: str, is_one: bool) -> None:
    assert scores.asks(metric) == is_one
