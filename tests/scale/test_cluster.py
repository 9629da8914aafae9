"""Workers on threads and on Ray behave alike: calls, what travels, faults, and deaths."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.scale.cluster import Cluster, Threads, WorkerDied, WorkerFailed

sys.path.insert(0, str(Path(__file__).parent))
from workers import Adder

X = {"x": np.ones(4)}


@pytest.fixture(scope="module", params=["threads", "ray"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if request.param == "threads":
        made: Any = Threads()
    else:
        from panoply.scale.rays import Rays

        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        made = Rays("local")
    yield made
    made.close()


def test_a_worker_keeps_what_it_is_told_and_answers_in_order(cluster: Cluster) -> None:
    one, two = cluster.place("adder", 2, Adder, 1.0)
    assert [one.name, two.name, one.role] == ["adder-0", "adder-1", "adder"]
    assert one.node == two.node != ""
    shared = cluster.put(X)
    asked = [one.call("add", shared), one.call("add", shared), two.call("add", X)]
    assert [future.result() for future in asked] == [5.0, 9.0, 5.0]
    assert [future.worker for future in asked] == ["adder-0", "adder-0", "adder-1"]
    with pytest.raises(WorkerFailed, match="adder-0: ValueError: assignment destination is read-only"):
        one.call("write", shared).result()
    with pytest.raises(WorkerFailed, match="ZeroDivisionError.*\n(.*\n)*.*in fault"):
        one.call("fault").result()
    with pytest.raises(PanoplyError, match=r"^That cannot be\.$"):
        one.call("refuse").result()
    assert one.call("add", shared).result() == 13.0  # a fault ends nothing
    for handle in (one, two):
        handle.kill()


def test_those_that_are_done_come_first(cluster: Cluster) -> None:
    one, two = cluster.place("waiter", 2, Adder, 0.0)
    slow, fast = one.call("wait", 0.6), two.call("wait", 0.0)
    assert cluster.wait([slow, fast]) == [fast]
    assert cluster.wait([slow], timeout=0.01) == []
    with pytest.raises(TimeoutError):
        slow.result(timeout=0.01)
    assert not slow.done()
    assert set(cluster.wait([slow, fast])) >= {fast}
    assert slow.result() == 0.6
    for handle in (one, two):
        handle.kill()


def test_a_killed_worker_says_so_to_all_that_wait_and_its_name_is_free(cluster: Cluster) -> None:
    one, two = cluster.place("mortal", 2, Adder, 0.0)
    waiting = [one.call("wait", 0.3), one.call("add", X)]
    one.kill()
    assert set(cluster.wait(waiting, timeout=10))
    for future in (*waiting, one.call("add", X)):
        with pytest.raises(WorkerDied, match="The worker mortal-0 died") as said:
            future.result()
        assert said.value.worker == "mortal-0"
    (next_one,) = cluster.place("mortal", 1, Adder, 2.0)
    one.kill()  # the second time changes nothing
    assert next_one.name == "mortal-0"
    assert cluster.place("mortal", 1, Adder, 0.0)[0].name == "mortal-2"
    assert [next_one.call("add", X).result(), two.call("add", X).result()] == [6.0, 4.0]


def test_who_cannot_be_made_is_told_of_at_once(cluster: Cluster) -> None:
    with pytest.raises(PanoplyError, match=r"^It begins below zero\.$"):
        cluster.place("negative", 2, Adder, -1.0)
    assert cluster.place("negative", 1, Adder, 0.0)[0].name == "negative-0"


def test_a_process_that_is_gone_is_noticed() -> None:
    """Ray's alone: threads have no processes."""
    from panoply.scale.rays import Rays

    here = Rays("local")  # joins what the fixture has started, where that still stands
    try:
        (one,) = here.place("process", 1, Adder, 0.0)
        process, threads = one.call("where").result()
        assert process != os.getpid()
        assert threads == 1
        with pytest.raises(WorkerDied, match="The worker process-0 died"):
            one.call("die").result()
        assert here.place("process", 1, Adder, 0.0)[0].name == "process-0"
        with pytest.raises(PanoplyError, match="2 learners need 2 GPUs, and the cluster has 0 GPUs"):
            here.place("learner", 2, Adder, 0.0, gpus=1)
    finally:
        here.close()
