"""Learners in processes of their own, which Ray starts: the bits of threads, also when one is killed; and pieces."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scale.test_group import fingerprint, tiny
from spread import apart, logged, spread

import panoply as pp
from panoply.progress import Progress
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
    assert [(line["step"], line["worker"], line["restarts"]) for line in lines] == [
        (step, f"learner-{number}", step - 1) for step in (1, 2) for number in (0, 1)
    ]


def test_pieces_learn_what_one_process_does_over_unequal_passes(cluster: Rays, tmp_path: Path) -> None:
    """FSDP2 over two processes. A rank whose rows fit into fewer passes keeps step; its checkpoint is anybody's."""
    plan = tiny("kto", micro_tokens=100, checkpoint_every=1, keep=9, settings={"update.lr": 1e-3})
    one = logged(plan, tmp_path / "one")
    assert one[-1]["gradient_norm"] > 0
    pieces = tmp_path / "pieces"
    gap, where = apart(one, logged(spread(plan, cluster="local", layout="sharded"), pieces))
    assert gap <= 1, where
    shutil.rmtree(pieces / "checkpoints" / "step-0000002")
    (pieces / "result.json").unlink()
    pp.train(resume=pieces, learners=0, progress=Progress())
    assert Run.open(pieces).metrics()[-1]["gradient_norm"] == pytest.approx(
        one[-1]["gradient_norm"], rel=1e-6
    )
