"""Learners in processes of their own, which Ray starts: the same bits as on threads, also when one is killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scale.test_group import fingerprint, tiny
from spread import logged, spread

from panoply.run import Run
from panoply.scale.rays import Rays, RayWorker


@pytest.fixture(scope="module")
def cluster() -> Iterator[Rays]:
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    made = Rays("local")
    yield made
    made.close()


def test_a_killed_process_changes_nothing(
    cluster: Rays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo sums in the order of ranks, as threads do; what died in the second step is there again."""
    plan = spread(tiny("grpo", checkpoint_every=1, settings={"update.lr": 1e-3}), restarts=1)
    expected = logged(plan, tmp_path / "threads")
    call, killed = RayWorker.call, list[str]()

    def fatal(worker: RayWorker, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "move" and args[1] == 1 and worker.name == "learner-1" and not killed:
            killed.append(worker.name)
            worker.kill()
        return call(worker, method, *args, **kwargs)

    monkeypatch.setattr(RayWorker, "call", fatal)
    assert logged(spread(plan, cluster="local", restarts=1), tmp_path / "ray") == expected
    assert killed == ["learner-1"]
    assert fingerprint(tmp_path / "ray") == fingerprint(tmp_path / "threads")
    lines = Run.open(tmp_path / "ray").workers()
    assert [(line["step"], line["worker"]) for line in lines] == [
        (step, f"learner-{number}") for step in (1, 2) for number in (0, 1)
    ]
