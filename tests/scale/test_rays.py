"""Workers in processes of their own, which Ray starts: the bits of threads, also when one is killed; and pieces.

All that starts Ray is here, and starts it once. A process takes seconds to import torch, so that few are started.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scale.test_cluster import answer_fail_and_die
from scale.test_fleet import both, planned, same
from scale.test_group import fingerprint, tiny
from spread import apart, logged, spread

import panoply as pp
from panoply.errors import PanoplyError
from panoply.progress import Progress
from panoply.run import Run
from panoply.scale import rays
from panoply.scale.cluster import WorkerDied
from panoply.scale.rays import Rays, RayWorker

sys.path.insert(0, str(Path(__file__).parent))
from workers import Adder


@pytest.fixture(scope="module")
def cluster() -> Iterator[Rays]:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    made = Rays("local")
    assert list(Path(made.folder).glob("session_*/sockets")), "Ray is where it is told to be"
    yield made
    made.close()
    assert made.folder
    assert not Path(made.folder).exists()


def test_a_folder_of_its_own_has_a_short_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets lie in it, whose names may have 107 letters."""
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    for place, where in ((deep, "/tmp"), (Path("/tmp"), "/tmp")):
        monkeypatch.setattr(rays.tempfile, "tempdir", str(place))
        made = Path(rays._own_folder())
        assert str(made.parent) == where
        assert len(str(made / "session_2026-11-18_08-43-00_123456_1234567/sockets/plasma_store")) <= 107
        rays._remove(str(made))
        assert not made.exists()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert rays._own_folder() == "", "somebody wants it elsewhere"
    held = tmp_path / "held"
    held.mkdir()
    rays._end(str(held), os.getpid() + 1)
    assert held.exists(), "a forked process takes nothing away"


def test_workers_of_ray_are_like_those_on_threads(cluster: Rays) -> None:
    """A process that is gone is noticed; GPUs that are not there are refused; the store is measured."""
    left = answer_fail_and_die(cluster)
    process, threads = left.call("where").result()
    assert process != os.getpid()
    assert threads == 1
    again = Rays("local")  # joins what is there, and leaves it as it is
    before, held = again.store_bytes(), again.put(np.zeros(10**6))
    assert again.store_bytes() - before == pytest.approx(8e6, rel=0.01)
    del held
    again.close()
    with pytest.raises(PanoplyError, match="was started for another run, and ends with it"):
        rays._check_lasts()  # as another run is told that looks for a cluster here
    with pytest.raises(WorkerDied, match="The worker adder-1 died"):
        left.call("die").result()
    with pytest.raises(PanoplyError, match="2 learners need 2 GPUs, and the cluster has 0 GPUs"):
        cluster.place("learner", 2, Adder, 0.0, gpus=1)


def test_a_killed_sampler_changes_nothing(cluster: Rays) -> None:
    fleet, alone = both(cluster, planned("keydoor", 1))  # type: ignore[arg-type]
    tasks = alone.tasks(3)
    same(fleet.episodes(tasks, 2), alone.episodes(tasks, 2))
    fleet.crew.members[0].handle.kill()
    with torch.no_grad():
        for weight in fleet.policy.parameters():
            weight.add_(0.01)
    same(fleet.episodes(tasks, 2), alone.episodes(tasks, 2))
    (line,) = fleet.workers(1)
    assert (line["worker"], line["restarts"]) == ("sampler-0", 1)
    fleet.close()


def test_a_killed_learner_changes_nothing(
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
