"""A cluster of Ray: workers are its actors. The only file that imports ray.

`local` starts Ray on this machine for as long as the run lasts, `auto` joins the cluster that this machine is in, and
`ray://HOST:PORT` asks a distant one. Ray is told nothing but where to put workers and when to end them: it restarts
none, since only the driver knows what a worker held.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from panoply.errors import PanoplyError, Resumable, first_line, needs_extra
from panoply.scale.cluster import Future, Handle, Held, Names, WorkerDied, standing, unwrapped

try:
    import ray
    from ray.exceptions import (
        GetTimeoutError,
        ObjectStoreFullError,
        OutOfDiskError,
        RayActorError,
        RayError,
    )
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ImportError as error:
    raise needs_extra("Ray", "cluster", "A run on several processes or machines") from error

PATIENCE = 10.0
"""Seconds in which a cluster must answer, and a place for a worker must be found."""
GLIMPSE = 0.5
"""Seconds that a run waits to hear how much the object store holds."""
STORE = 2**31
"""Bytes of shared memory that a Ray started here may hold; what is beyond lies in files of its temporary folder."""
SOCKETS = 70
"""Letters that Ray puts after its temporary folder to name a socket."""
LONGEST_SOCKET = 107
"""Letters of a socket's name that Linux allows, and Ray counts."""
COMPARED = ("panoply", "python", "torch")
"""What must be the same on every machine."""
OF_ONE_RUN = "panoply_run"
"""The resource that marks a Ray started for one run, with which it ends; `auto` would find it, and is to pass it by."""


class Rays:
    """Workers wherever Ray puts them. `threads` is how many of a processor each computes with."""

    def __init__(self, address: str = "local", threads: int = 1, store: int = STORE):
        self.names, self.threads = Names(), threads
        self.groups: list[Any] = []
        self._state: Any = None
        self._asking, self._bytes = threading.Thread(), 0
        self.placed: list[RayWorker] = []
        self.own = not ray.is_initialized()
        self.folder = _own_folder() if self.own and address == "local" else ""
        """Where the processes of a Ray that is started here keep sockets, logs and what the store has no room for."""
        if self.folder:
            atexit.register(_end, self.folder, os.getpid())
        if self.own:
            _reach(address)
            _start(address, store, self.folder)
        if address != "local":
            try:
                _check_lasts()
                _check_versions()
            except BaseException:
                self.close()
                raise

    def place(self, role: str, n: int, make: Callable[..., Any], *args: Any, gpus: float = 0) -> list[Handle]:
        if gpus and gpus * n > self.gpus():
            there = f"{self.gpus()} GPU{'' if self.gpus() == 1 else 's'}"
            raise PanoplyError(
                f"{n} {role}s need {gpus * n:g} GPUs, and the cluster has {there}: ask for fewer, or compute with "
                "--device cpu."
            )
        where: Any = self._together(n, gpus) if gpus else "SPREAD"
        named: Any = type(role.capitalize(), (Stage,), {})  # as `ps` and Ray's own pages show it
        actor = ray.remote(named).options(
            num_cpus=0, num_gpus=gpus, scheduling_strategy=where, max_restarts=0
        )
        names = self.names.take(role, n)
        placed = [RayWorker(self, name, role, actor.remote(self.threads, make, *args)) for name in names]
        self.placed += placed
        return standing(list(placed))

    def _together(self, n: int, gpus: float) -> Any:
        """A place of `n` bundles, on as few machines as hold them."""
        group = placement_group([{"GPU": gpus}] * n, strategy="PACK")
        if not group.wait(PATIENCE):
            remove_placement_group(group)
            raise PanoplyError(
                f"{gpus * n:g} GPUs are not free: others use them. Wait for them, or ask for fewer."
            )
        self.groups.append(group)
        return PlacementGroupSchedulingStrategy(group)

    def put(self, value: Any) -> Any:
        with _room():
            return ray.put(value)

    def wait(self, futures: Sequence[Future], timeout: float | None = None) -> list[Future]:
        held = {future.held: future for future in futures if isinstance(future, RayFuture)}
        ready, _ = ray.wait(list(held), num_returns=1, timeout=timeout, fetch_local=False)
        rest = [one for one in held if one not in set(ready)]
        more, _ = ray.wait(rest, num_returns=len(rest), timeout=0, fetch_local=False) if rest else ([], [])
        return [held[one] for one in (*ready, *more)]

    def gpus(self) -> int:
        return int(_resources().get("GPU", 0))

    def cores(self) -> int:
        return int(_resources().get("CPU", 1))

    def store_bytes(self) -> int:
        """Of the machine that this process is on. Ray asks every worker for it, and waits a minute for one that hangs:
        then the last number stands that was heard."""
        if not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask_store, daemon=True)
            self._asking.start()
        self._asking.join(GLIMPSE)
        return self._bytes

    def _ask_store(self) -> None:
        """Of Ray's inside, which may change: then it is not told."""
        with contextlib.suppress(Exception):
            from ray._private.internal_api import get_memory_info_reply, get_state_from_address

            if self._state is None:
                here = ray.get_runtime_context().gcs_address  # another cluster may be on this machine, too
                self._state = get_state_from_address(here)  # type: ignore[no-untyped-call]
            reply = get_memory_info_reply(self._state)  # type: ignore[no-untyped-call]
            self._bytes = int(reply.store_stats.object_store_bytes_used)

    def close(self) -> None:
        # asked for anything after its end, Ray would look for another cluster, and wait
        there = ray.is_initialized()
        for worker in self.placed if there else ():
            with contextlib.suppress(Exception):
                worker.kill()
        for group in self.groups if there else ():
            with contextlib.suppress(Exception):
                remove_placement_group(group)
        self.placed, self.groups = [], []
        if self.own and ray.is_initialized():
            with _signals():
                ray.shutdown()
        _remove(self.folder)


class Stage(Held):
    """The actor: a worker, and how it computes."""

    def __init__(self, threads: int, make: Callable[..., Any], *args: Any):
        import torch

        from panoply.threads import keep_memory

        torch.set_num_threads(threads)
        keep_memory()
        super().__init__(make, *args)


class RayFuture:
    def __init__(self, held: Any, worker: RayWorker):
        self.held, self._worker, self.worker = held, worker, worker.name
        self._found: Any = None
        """The answer, once it was fetched: whoever waits for many looks at each, and asks again for all."""

    def done(self) -> bool:
        ready, _ = ray.wait([self.held], timeout=0, fetch_local=False)
        return bool(ready)

    def result(self, timeout: float | None = None) -> Any:
        try:
            if self._found is None:
                with _room():
                    self._found = ray.get(self.held, timeout=timeout)
        except GetTimeoutError as error:
            raise TimeoutError(f"{self.worker} has not answered in {timeout:g} seconds.") from error
        except RayActorError as error:
            self._worker.gone()
            raise WorkerDied.of(self.worker, first_line(error)[:200]) from error
        except RayError as error:
            raise WorkerDied.of(self.worker, first_line(error)[:200]) from error
        return unwrapped(self._found, self.worker)


class RayWorker:
    def __init__(self, cluster: Rays, name: str, role: str, actor: Any):
        self.cluster, self.name, self.role, self.node, self.actor = cluster, name, role, "", actor
        self.dead = False

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future:
        with _room():
            return RayFuture(self.actor.do.remote(method, *args, **kwargs), self)

    def kill(self) -> None:
        ray.kill(self.actor, no_restart=True)
        self.gone()

    def gone(self) -> None:
        """Its name is free for who takes its place."""
        if not self.dead:
            self.dead = True
            self.cluster.names.free(self.name)


# ------------------------------------------------------------------ starting


def _reach(address: str) -> None:
    """Refuse an address at which nobody answers, before Ray tries for minutes."""
    if address == "auto":
        address = _noted_address()
    if (found := re.fullmatch(r"(?:ray://)?(.+):(\d+)", address)) is None:
        return
    try:
        socket.create_connection((found[1], int(found[2])), timeout=PATIENCE).close()
    except OSError as error:
        raise PanoplyError(
            f"Nobody answers at {address} ({error.strerror or 'it takes too long'}): start Ray there, or name another "
            "address."
        ) from error


def _noted_address() -> str:
    """Where Ray looks for the cluster of this machine: also at an address that was noted when one began, though it may
    have gone since without a word."""
    with contextlib.suppress(Exception):  # of Ray's inside, which may change; and where there is none
        from ray._private.services import get_ray_address_from_environment

        return str(get_ray_address_from_environment("auto", None))
    return os.environ.get("RAY_ADDRESS", "")


def _own_folder() -> str:
    """A temporary folder that is removed with the Ray it is for; empty where Ray is to take one of its own, which
    stays: somebody has named it, or none has a name that is short enough."""
    for place in ("",) if os.environ.get("RAY_TMPDIR") else (tempfile.gettempdir(), "/tmp"):
        room = LONGEST_SOCKET - SOCKETS - len(os.path.join(place, "panoply-ray-xxxxxxxx/"))
        if place and room >= 0 and os.access(place, os.W_OK):
            return tempfile.mkdtemp(prefix="panoply-ray-", dir=place)
    return ""


def _remove(folder: str) -> None:
    """Take a folder of Ray's away, once the last of its processes writes no more."""
    for _ in range(20):
        if not folder or not os.path.exists(folder):
            return
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


def _end(folder: str, process: int) -> None:
    """The same where a process ends that has not closed its cluster; processes that it forked leave it alone."""
    if os.getpid() == process and os.path.exists(folder):
        if ray.is_initialized():
            ray.shutdown()
        _remove(folder)


def _start(address: str, store: int, folder: str = "") -> None:
    """Start or join Ray, quietly; signals stay with those who handle them."""
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # a worker without GPUs sees those of its machine
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    settings: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "namespace": "panoply",
    }
    if address == "local":
        settings |= {
            "include_dashboard": False,
            "object_store_memory": store,
            "resources": {OF_ONE_RUN: 1},
            **({"_temp_dir": folder} if folder else {}),
        }
        # workers compute for the run, and give way to others of this machine as little as one process does
        settings["_system_config"] = {"automatic_object_spilling_enabled": False, "worker_niceness": 0}
    else:
        _show_token()
    before = ray.is_initialized()
    try:
        with _signals(), _hushed() if address != "local" else contextlib.nullcontext():
            ray.init(address=address, **settings)
    except Exception as error:  # of many kinds, a plain one where Ray's processes take too long to start
        if ray.is_initialized() and not before:
            ray.shutdown()
        said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        if address == "local":
            raise PanoplyError(f"Ray could not be started: {said}.") from error
        if address == "auto" and "Could not find any running" in said:
            raise PanoplyError(
                "No Ray cluster is there that this machine is in: start one with ray start --head, join one with ray "
                "start --address=HOST:6379, or leave --cluster auto out."
            ) from error
        raise PanoplyError(
            f"The Ray cluster could not be joined ({said}), though something answers at its address: {_token()} must "
            "be that of the cluster (ray get-auth-token prints it there), and Ray must have the same version."
        ) from error


def _token() -> str:
    """Where the token of this process comes from, in words."""
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "the token in RAY_AUTH_TOKEN"
    lies = Path(path) if path else Path.home() / ".ray" / "auth_token"
    return (
        f"the token in {lies}"
        if lies.is_file()
        else f"the token in RAY_AUTH_TOKEN (or in {lies}; neither is there)"
    )


def _show_token() -> None:
    """Ray shows a cluster at a named address (`RAY_ADDRESS`, too) its token only if told to; one that wants none does
    not mind it."""
    with contextlib.suppress(Exception):  # of Ray's inside, which may change
        from ray._private.authentication import authentication_token_setup as tokens

        tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Ray's own processes say on this one's stderr, every second, that they are not let in: it is said once, below."""
    with contextlib.ExitStack() as back, open(os.devnull, "w") as nobody, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        before = os.dup(2)
        back.callback(os.close, before)
        back.callback(os.dup2, before, 2)
        os.dup2(nobody.fileno(), 2)
        yield


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; a run is to be told, and to save."""
    with contextlib.ExitStack() as back:
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # not the main thread, in which nothing is taken either
                held = signal.getsignal(number)
                signal.signal(number, held)
                back.callback(signal.signal, number, held)
        yield


def _resources() -> dict[str, float]:
    found: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return found


def _check_lasts() -> None:
    if OF_ONE_RUN in _resources():
        raise PanoplyError(
            "The Ray that is there was started for another run, and ends with it: start one with ray start --head, or "
            "leave --cluster auto out."
        )


def _versions() -> dict[str, str]:
    from panoply.run import versions

    return {name: version for name, version in versions().items() if name in COMPARED}


def _check_versions() -> None:
    """Every machine must compute as this one does."""
    mine, nodes = _versions(), [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    asked = [
        ray.remote(_versions)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote()
        for node in nodes
    ]
    for name, found in zip([node["NodeManagerHostname"] for node in nodes], asked, strict=True):
        try:
            theirs = ray.get(found, timeout=6 * PATIENCE)
        except RayError as error:
            raise PanoplyError(
                f"The machine {name} of the cluster cannot run Panoply: {first_line(error)[:200]}."
            ) from error
        compare_versions(mine, name, theirs)


def compare_versions(mine: dict[str, str], name: str, theirs: dict[str, str]) -> None:
    for what, version in mine.items():
        if theirs.get(what) != version:
            raise PanoplyError(
                f"The machine {name} has {what} {theirs.get(what, 'none')}, and this one {version}: install the same "
                "on both."
            )


@contextlib.contextmanager
def _room() -> Iterator[None]:
    """What travels and does not fit into shared memory lies in files; where they do not fit either, a run can only
    stop. A worker whose answer did not fit lives on, so that this is told before its death is thought of."""
    try:
        yield
    except (ObjectStoreFullError, OutOfDiskError) as error:
        raise Resumable(
            "The object store of the cluster is full, and so is the disk of Ray's temporary folder: lower --staleness, "
            "make batches smaller, free space there, or start Ray with more --object-store-memory."
        ) from error
