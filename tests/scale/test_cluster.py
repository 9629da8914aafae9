"""Workers: calls, what travels, faults, and deaths; and what is said where Ray cannot be had. See test_rays.py, too."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from panoply.errors import PanoplyError, Resumable
from panoply.scale.cluster import Cluster, Handle, Threads, WorkerDied, WorkerFailed

sys.path.insert(0, str(Path(__file__).parent))
from workers import Adder

X = {"x": np.ones(4)}


def answer_fail_and_die(cluster: Cluster) -> Handle:
    """What workers do alike everywhere; the one of two that is left."""
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

    slow, fast = one.call("wait", 0.4), two.call("wait", 0.0)
    assert cluster.wait([slow, fast]) == [fast]  # those that are done come first
    assert cluster.wait([slow], timeout=0.01) == []
    with pytest.raises(TimeoutError):
        slow.result(timeout=0.01)
    assert not slow.done()
    assert slow.result() == 0.4

    waiting = [one.call("wait", 0.3), one.call("add", X)]
    one.kill()
    assert set(cluster.wait(waiting, timeout=10))
    for future in (*waiting, one.call("add", X)):
        with pytest.raises(WorkerDied, match="The worker adder-0 died") as said:
            future.result()
        assert said.value.worker == "adder-0"
    one.kill()  # the second time changes nothing
    assert two.call("add", X).result() == 9.0
    return two


def test_workers_answer_fail_and_die_and_are_followed() -> None:
    cluster = Threads()
    left = answer_fail_and_die(cluster)
    (instead,) = cluster.place("adder", 1, Adder, 2.0)
    assert instead.name == "adder-0"
    assert [instead.call("add", X).result(), left.call("add", X).result()] == [6.0, 13.0]
    cluster.close()


def test_who_cannot_be_made_is_told_of_at_once() -> None:
    cluster = Threads()
    with pytest.raises(PanoplyError, match=r"^It begins below zero\.$"):
        cluster.place("negative", 2, Adder, -1.0)
    assert cluster.place("negative", 1, Adder, 0.0)[0].name == "negative-0"
    assert cluster.place("negative", 1, Adder, 0.0)[0].name == "negative-1"
    with pytest.raises(PanoplyError, match="Threads have no GPUs"):
        cluster.place("negative", 1, Adder, 0.0, gpus=1)
    cluster.close()


def test_machines_with_other_versions_are_refused_with_both() -> None:
    from panoply.scale.rays import compare_versions

    mine = {"panoply": "0.1", "torch": "2.11"}
    compare_versions(mine, "node-7", dict(mine))
    with pytest.raises(
        PanoplyError, match=r"The machine node-7 has torch 2\.10, and this one 2\.11: install the same"
    ):
        compare_versions(mine, "node-7", {**mine, "torch": "2.10"})


def test_a_cluster_that_is_not_there_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from panoply.scale import rays

    with pytest.raises(PanoplyError, match=r"Nobody answers at ray://127\.0\.0\.1:1 \(Connection refused\)"):
        rays._reach("ray://127.0.0.1:1")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(PanoplyError, match=r"Nobody answers at 127\.0\.0\.1:1 "):
        rays._reach("auto")
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda place: "127.0.0.1:2")
    with pytest.raises(
        PanoplyError, match=r"Nobody answers at 127\.0\.0\.1:2 "
    ):  # it was killed, and is still noted
        rays._reach("auto")


def test_the_ray_of_another_run_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    from panoply.scale import rays

    monkeypatch.setattr(rays, "_reach", lambda address: None)
    monkeypatch.setattr(rays, "_start", lambda *_: None)
    monkeypatch.setattr(rays, "_resources", lambda: {"CPU": 2.0, rays.OF_ONE_RUN: 1.0})
    with pytest.raises(PanoplyError, match="was started for another run, and ends with it"):
        rays.Rays("auto")


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks every worker what it holds, also one that hangs."""
    from panoply.scale import rays

    answers, there = threading.Event(), rays.Rays.__new__(rays.Rays)
    there._asking, there._bytes = threading.Thread(), 7
    monkeypatch.setattr(rays, "GLIMPSE", 0.01)
    monkeypatch.setattr(there, "_ask_store", lambda: answers.wait(10))
    began = time.monotonic()
    assert [there.store_bytes(), there.store_bytes()] == [7, 7]
    assert time.monotonic() - began < 5
    answers.set()


def test_what_ray_raises_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A disk that is full is no worker's death; a start that failed and a token that is not the cluster's are named."""
    from ray.exceptions import OutOfDiskError, RayTaskError

    from panoply.scale import rays

    class Gone:
        name = "sampler-0"

        def gone(self) -> None:
            raise AssertionError("nobody died")

    full = OutOfDiskError("Local disk is full")
    raised: list[Exception] = [full, RayTaskError("do", "…", full).as_instanceof_cause()]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise raised[0]

    monkeypatch.setattr(rays.ray, "get", fail)
    while raised:
        with pytest.raises(Resumable, match="object store of the cluster is full, and so is the disk"):
            rays.RayFuture(None, Gone()).result()  # type: ignore[arg-type]
        raised.pop(0)

    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(rays.ray, "init", fail)
    shown: list[str] = []
    monkeypatch.setattr(rays, "_show_token", lambda: shown.append("token"))
    for address, said, told in [
        (
            "local",
            "The current node timed out\n…",
            r"^Ray could not be started: The current node timed out\.$",
        ),
        (
            "auto",
            "Could not find any running Ray instance.",
            "^No Ray cluster is there that this machine is in",
        ),
        (
            "auto",
            "Failed to connect.",
            r"joined \(Failed to connect\).*auth_token; neither is there\) must be that",
        ),
    ]:
        raised.append(Exception(said))
        with pytest.raises(PanoplyError, match=told):
            rays._start(address, 0)
        raised.clear()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    raised.append(ConnectionError("timeout"))
    with pytest.raises(PanoplyError, match="the token in RAY_AUTH_TOKEN must be that of the cluster"):
        rays._start("ray://head:10001", 0)
    assert len(shown) == 3  # to all but the one that is started here
