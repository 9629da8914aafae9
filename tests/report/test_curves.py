"""Curves with bands, worked out by hand."""

from __future__ import annotations

import pytest

from panoply.report import curves
from panoply.report.curves import Experiment, curve, differences, labels, metric_names, settings_of


def seeds(*rows: list[dict]) -> Experiment:
    return Experiment("it", tuple(f"s{i}" for i in range(len(rows))), tuple(rows))


def test_mean_and_range_over_the_seeds_that_got_there() -> None:
    one = [{"step": 1, "reward": 0.0}, {"step": 2, "reward": 1.0}, {"step": 3, "reward": 5.0}]
    two = [{"step": 1, "reward": 2.0}, {"step": 2, "reward": 4.0}]
    found = curve(seeds(one, two), "reward").to_json()
    assert found["x"] == [1, 2, 3]
    assert found["mean"] == [1.0, 2.5, 5.0]
    assert (found["low"], found["high"]) == ([0.0, 1.0, 5.0], [2.0, 4.0, 5.0])


def test_what_was_not_measured_is_left_out() -> None:
    rows = [{"step": 1, "held": None}, {"step": 2, "held": 0.5}, {"step": 3}, {"held": 9.0}]
    assert curve(seeds(rows), "held").to_json()["x"] == [2]
    assert curve(seeds(rows, []), "nothing").to_json()["mean"] == []


def test_other_axes() -> None:
    one = [
        {"step": 1, "seconds": 2.0, "decisions": 10, "r": 1},
        {"step": 2, "seconds": 4.0, "decisions": 5, "r": 2},
    ]
    two = [
        {"step": 1, "seconds": 4.0, "decisions": 30, "r": 1},
        {"step": 2, "seconds": 6.0, "decisions": 5, "r": 2},
    ]
    assert curve(seeds(one, two), "r", "seconds").to_json()["x"] == [3.0, 5.0]
    assert curve(seeds(one, two), "r", "decisions").to_json()["x"] == [20, 25]


def test_smoothing_is_not_pulled_to_zero() -> None:
    rows = [{"step": i, "r": v} for i, v in enumerate([1.0, 1.0, 4.0])]
    found = curve(seeds(rows), "r", smooth=0.5).to_json()["mean"]
    assert found == pytest.approx([1.0, 1.0, (0.25 + 0.5 + 4) / 1.75], rel=1e-5)


def test_long_curves_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "POINTS", 2)
    rows = [{"step": i, "r": float(i)} for i in range(4)]
    found = curve(seeds(rows), "r").to_json()
    assert (found["x"], found["mean"]) == ([0.5, 2.5], [0.5, 2.5])


def test_infinite_numbers_are_null() -> None:
    rows = [{"step": 1, "r": float("inf")}, {"step": 2, "r": 1.0}]
    assert curve(seeds(rows), "r").to_json()["mean"] == [None, 1.0]


def test_metrics_in_the_order_of_interest() -> None:
    rows = [
        {
            "step": 1,
            "seconds": 0,
            "seconds_sample": 1,
            "zeta": 1,
            "reward": 1,
            "held_out_sampled": 1,
            "note": "x",
        }
    ]
    assert metric_names([rows]) == ["held_out_sampled", "reward", "zeta", "seconds_sample"]


def plan(method: str = "grpo@1", lr: float = 0.1, seed: int = 0, **more: object) -> dict:
    update = {"part": "update.adam", "lr": lr}
    return {
        "method": {"id": method, "update": update, **more},
        "world": {"id": "chain@1"},
        "run": {"seed": seed},
    }


def test_settings_are_named_as_set_names_them() -> None:
    found = settings_of(plan(select=[{"part": "select.a", "n": 2}], sinks=["x", "y"]))
    assert found["update"] == "update.adam"
    assert found["update.lr"] == "0.1"
    assert found["select.0.n"] == "2"
    assert found["sinks"] == "x, y"
    assert (found["method"], found["world"]) == ("grpo@1", "chain@1")


def test_differences_leave_the_seed_out_and_mark_what_is_absent() -> None:
    first = plan(seed=1, beta=2)
    first["method"]["update"]["warmup"] = 5
    found = differences({"a": plan(lr=0.2, seed=2, beta=3), "b": first})
    assert found == [("update.lr", ["0.2", "0.1"]), ("update.warmup", ["–", "5"]), ("beta", ["3", "2"])]


def test_labels_say_what_differs_only_where_they_must() -> None:
    found = labels({"a": plan(), "b": plan(lr=0.2), "c": plan("dapo@1")})
    assert found == {"a": "grpo · chain, lr 0.1", "b": "grpo · chain, lr 0.2", "c": "dapo · chain"}


def test_plans_of_another_shape_do_not_fail() -> None:
    odd = {"method": "grpo", "steps": 3}
    assert labels({"a": odd, "b": {}}) == {"a": "? · ?, method grpo", "b": "? · ?, method none"}
