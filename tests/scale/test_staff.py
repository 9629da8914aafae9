"""Whole runs elsewhere: their folders come back, and hold what a local process makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny

import panoply as pp
from panoply.evidence import cache, pool, scores
from panoply.run import Run
from panoply.scale import rays, staff
from panoply.scale.cluster import Threads
from panoply.scale.travel import Unpacked, files_in


def plan(seed: int, **more: Any) -> pp.Plan:
    settings = {**tiny.SETTINGS, **more.pop("settings", {})}
    return pp.plan("grpo", "chain", settings=settings, model="fresh", steps=2, threads=1, seed=seed, **more)


def _alone(folder: Path) -> pp.Trained:
    return pp.train(plan(1), run=folder, progress=pp.Progress())


class Notes(pool.Watch):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_runs_elsewhere_are_those_of_here(tmp_path: Path) -> None:
    orders = [pool.Order(f"run {seed}", plan(seed), ("pass@2",) * (seed == 1)) for seed in (1, 2)]
    pool.run_all(orders, tmp_path / "there", 1, pool.Watch(), cluster="threads")
    assert [order.problem for order in orders] == [None, None]
    for order in orders:
        here = pp.train(order.plan, run=tmp_path / f"here-{order.name}", progress=pp.Progress())
        there = Run.open(order.folder)
        assert there.result()["fingerprint"] == here.fingerprint
        assert list(map(tiny.untimed, there.metrics())) == list(map(tiny.untimed, tiny.metrics(here.run)))
        assert cache.finished(order.folder) is not None
    assert set(json.loads((orders[0].folder / scores.MEASURES).read_text())) == {"pass@2"}
    again = [pool.Order("again", plan(1))]
    pool.run_all(
        again, tmp_path / "there", 1, pool.Watch(), cluster="nowhere at all"
    )  # nothing is to be made
    assert again[0].cached


def test_a_run_that_was_begun_goes_on_elsewhere(tmp_path: Path) -> None:
    order = pool.Order("run", plan(1))
    order.folder = cache.place(order.plan, tmp_path)
    for step in pp.steps(order.plan, run=order.folder, progress=pp.Progress()):
        assert step.number == 1
        break
    staffed = pool.Order("run", plan(1))
    pool.run_all([staffed], tmp_path, 1, pool.Watch(), cluster="threads")
    assert staffed.problem is None
    assert len(Run.open(order.folder).metrics()) == 2
    assert Run.open(order.folder).result()["fingerprint"] == _alone(tmp_path / "whole").fingerprint


def test_a_run_that_fails_or_whose_worker_dies_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = staff.Runner.run

    def run(self: staff.Runner, parcel: Any, measures: Any) -> Any:
        if parcel["plan"]["run"]["seed"] == 1:
            for member in members:
                member.stop()
        if parcel["plan"]["run"]["seed"] == 2:
            raise pp.PanoplyError("Seed 2 is not wanted.")
        return first(self, parcel, measures)

    members: list[staff.Member] = []
    made = staff.Staff.worker
    monkeypatch.setattr(staff.Runner, "run", run)
    monkeypatch.setattr(
        staff.Staff, "worker", lambda self, news: members.append(made(self, news)) or members[-1]
    )
    orders, watch = [pool.Order(f"run {seed}", plan(seed)) for seed in (1, 2, 3)], Notes()
    pool.run_all(orders, tmp_path, 1, watch, cluster="threads")
    assert [o.problem for o in orders] == ["The worker runner-0 died.", "Seed 2 is not wanted.", None]
    assert watch.said == ["run 1 failed: The worker runner-0 died.", "run 2 failed: Seed 2 is not wanted."]


def test_paths_of_files_that_travelled_come_back_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("x = 1\n")
    record = {"plugins": [str(file)], "world": {"rewards": (f"own:{file}:good",), "data": "/nowhere/x.jsonl"}}
    files = files_in(record)
    assert files == {str(file): b"x = 1\n"}
    assert Unpacked(files).here(record)["plugins"] == [str(file)]  # it lies here already
    file.write_text("x = 2\n")
    opened = Unpacked(files)
    there = opened.here(record)
    assert Path(there["plugins"][0]).read_text() == "x = 1\n"
    assert there["world"]["rewards"] == [f"own:{there['plugins'][0]}:good"]
    assert opened.back(str(there)) == str(
        {**record, "world": {**record["world"], "rewards": [f"own:{file}:good"]}}
    )


def test_a_staff_is_of_the_cluster_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(Threads):
        def __init__(self, address: str, threads: int):
            super().__init__()
            self.address = address

        def cores(self) -> int:
            return 3

    monkeypatch.setattr(rays, "Rays", Named)
    hired: Any = staff.staff("ray://head:10001", None, most=2)
    assert (hired.cluster.address, hired.number) == ("ray://head:10001", 2)
    hired.close()
    hired = staff.staff("auto", None, most=9)
    assert (hired.cluster.address, hired.number) == ("auto", 3)
    hired.close()
