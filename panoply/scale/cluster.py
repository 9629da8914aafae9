"""Where workers are: on threads of this process, or wherever Ray puts them (`rays.py`).

A worker is an ordinary object with methods; it knows nothing of where it is. The driver holds a `Handle` of it, calls a
method by name and gets a `Future` at once. What travels is copied on the way, in both directions, and arrays arrive
read-only: a worker that wants to change one copies it. A worker makes its calls one after another, in the order in
which they were asked for.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import os
import pickle
import platform
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from panoply.errors import PanoplyError, Resumable
from panoply.threads import without_denormals

if TYPE_CHECKING:
    from panoply.planning import Options


class WorkerDied(Resumable):
    """A worker that was asked for something has gone: killed, out of memory, or its machine with it."""

    def __init__(self, says: str, worker: str = ""):
        super().__init__(says)
        self.worker = worker

    @classmethod
    def of(cls, worker: str, why: str = "") -> WorkerDied:
        return cls(f"The worker {worker} died{f': {why}' if why else ''}.", worker)


class WorkerFailed(RuntimeError):
    """A fault in a worker's own code, with the traceback it had there."""


class Future(Protocol):
    """What a worker was asked for."""

    worker: str
    """The name of who was asked."""

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it. `WorkerDied` where the worker has gone, `TimeoutError` where it takes longer, and what the
        worker itself raised: a `PanoplyError` as it was, anything else as `WorkerFailed`."""


class Handle(Protocol):
    """One worker, wherever it is."""

    name: str
    """Its role and number. Who takes the place of one that died has its name."""
    role: str
    node: str
    """The machine it is on."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future:
        """Ask for something; returns at once."""

    def kill(self) -> None:
        """End it as `kill -9` would, also in the midst of a call."""


class Cluster(Protocol):
    """Where workers are placed."""

    def place(self, role: str, n: int, make: Callable[..., Any], *args: Any, gpus: float = 0) -> list[Handle]:
        """`n` new workers, each made by `make(*args)` where it will be; returns when all of them stand."""

    def put(self, value: Any) -> Any:
        """What many calls get as an argument, sent once to each machine: hand the result to `call` in its place."""

    def wait(self, futures: Sequence[Future], timeout: float | None = None) -> list[Future]:
        """Those that are done, at least one of them; none only when the time is over."""

    def gpus(self) -> int:
        """How many there are in all."""

    def cores(self) -> int:
        """Of processors, in all."""

    def store_bytes(self) -> int:
        """How much of what was put or returned is held at present."""

    def close(self) -> None:
        """Let all workers go, and what was started for them."""


def open_cluster(options: Options) -> Cluster:
    """The cluster that a run's options name; where only the engine is another, nobody is placed in it."""
    if options.cluster == "threads" or not (options.learners or options.samplers):
        return Threads()
    from panoply.scale.rays import Rays

    return Rays(options.cluster, threads=options.threads or 1)


# ------------------------------------------------------------------ names, and errors on their way


class Names:
    """Names of workers: the lowest numbers of a role that nobody has."""

    def __init__(self) -> None:
        self.taken: set[str] = set()

    def take(self, role: str, n: int) -> list[str]:
        free = (name for i in range(len(self.taken) + n) if (name := f"{role}-{i}") not in self.taken)
        found = [name for name, _ in zip(free, range(n), strict=False)]
        self.taken |= set(found)
        return found

    def free(self, name: str) -> None:
        self.taken.discard(name)


class Failure(NamedTuple):
    """What was raised in a worker, as words: exceptions themselves do not travel."""

    module: str
    kind: str
    says: str
    where: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        kind = type(error)
        return cls(kind.__module__, kind.__name__, str(error), traceback.format_exc())

    def again(self, worker: str) -> Exception:
        """The same to be raised here."""
        if self.module.split(".")[0] == "panoply":
            kind = getattr(importlib.import_module(self.module), self.kind, PanoplyError)
            if issubclass(kind, PanoplyError):
                with contextlib.suppress(TypeError):
                    made: PanoplyError = kind(self.says)
                    return made
                return PanoplyError(self.says)
        return WorkerFailed(f"{worker}: {self.kind}: {self.says}\n\n{self.where}")


STAND = "stand"
"""What a new worker is asked first: where it is, or why it could not be made."""

SEES = "sees"
"""Whether a folder is there, where a worker is."""


class Held:
    """The worker where it is: makes its calls as a run makes its steps, and turns what is raised into words."""

    def __init__(self, make: Callable[..., Any], *args: Any):
        self.failure: Failure | None = None
        try:
            self.worker = make(*args)
        except Exception as error:
            self.failure = Failure.of(error)

    def do(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self.failure is not None:
            return self.failure
        if method == STAND:
            return platform.node()
        if method == SEES:
            return os.path.isdir(args[0])
        try:
            with without_denormals():
                return getattr(self.worker, method)(*args, **kwargs)
        except Exception as error:
            return Failure.of(error)


def standing(placed: list[Handle]) -> list[Handle]:
    """New workers when all of them stand; where one cannot be made, none stays."""
    try:
        for handle, asked in [(handle, handle.call(STAND)) for handle in placed]:
            handle.node = asked.result()
    except BaseException:
        for handle in placed:
            handle.kill()
        raise
    return placed


def unwrapped(value: Any, worker: str) -> Any:
    """What a worker returned, or raised."""
    if isinstance(value, Failure):
        raise value.again(worker)
    return value


# ------------------------------------------------------------------ threads


def travelled(value: Any) -> Any:
    """A value as it arrives elsewhere: a copy, with arrays that cannot be written to."""
    buffers: list[pickle.PickleBuffer] = []
    flat = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(flat, buffers=[bytes(buffer) for buffer in buffers])


class Threads:
    """Workers on threads of this process. Nothing is gained, and nothing else is needed: for tests and breakpoints."""

    def __init__(self) -> None:
        self.names = Names()
        self.workers: list[ThreadWorker] = []

    def place(self, role: str, n: int, make: Callable[..., Any], *args: Any, gpus: float = 0) -> list[Handle]:
        if gpus:
            raise PanoplyError("Threads have no GPUs of their own: leave --cluster threads out.")
        placed = [ThreadWorker(self, name, role, make, args) for name in self.names.take(role, n)]
        self.workers += placed
        return standing(list(placed))

    def put(self, value: Any) -> Any:
        return travelled(value)

    def wait(self, futures: Sequence[Future], timeout: float | None = None) -> list[Future]:
        held = {future.held: future for future in futures if isinstance(future, ThreadFuture)}
        ready, _ = concurrent.futures.wait(held, timeout, concurrent.futures.FIRST_COMPLETED)
        return [future for inner, future in held.items() if inner in ready]

    def gpus(self) -> int:
        return 0

    def cores(self) -> int:
        return 1

    def store_bytes(self) -> int:
        return 0

    def close(self) -> None:
        for worker in list(self.workers):
            worker.kill()
        for worker in self.workers:
            worker.pool.shutdown(wait=True, cancel_futures=True)
        self.workers = []


class ThreadFuture:
    def __init__(self, held: concurrent.futures.Future[Any], worker: str):
        self.held, self.worker = held, worker

    def done(self) -> bool:
        return self.held.done()

    def result(self, timeout: float | None = None) -> Any:
        return unwrapped(self.held.result(timeout), self.worker)


class ThreadWorker:
    """A worker on a thread. A thread cannot be killed: what it still computes then reaches nobody."""

    def __init__(
        self, cluster: Threads, name: str, role: str, make: Callable[..., Any], args: tuple[Any, ...]
    ):
        self.cluster, self.name, self.role, self.node = cluster, name, role, ""
        self.pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)
        self.dead = False
        self.lock = threading.Lock()
        self.open: set[concurrent.futures.Future[Any]] = set()
        self.held = self.pool.submit(lambda: Held(make, *travelled(args)))

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future:
        promised: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self.lock:
            if self.dead:
                promised.set_exception(WorkerDied.of(self.name))
                return ThreadFuture(promised, self.name)
            self.open.add(promised)
            self.pool.submit(self._do, promised, method, *travelled((args, kwargs)))
        return ThreadFuture(promised, self.name)

    def _do(
        self,
        promised: concurrent.futures.Future[Any],
        method: str,
        args: Iterable[Any],
        kwargs: dict[str, Any],
    ) -> None:
        if self.dead:
            return
        try:
            found = travelled(self.held.result().do(method, *args, **kwargs))
        except Exception as error:  # what cannot travel
            found = Failure.of(error)
        with self.lock:
            if promised in self.open:
                self.open.discard(promised)
                promised.set_result(found)

    def kill(self) -> None:
        with self.lock:
            first, self.dead, waiting, self.open = not self.dead, True, self.open, set()
        for promised in waiting:
            promised.set_exception(WorkerDied.of(self.name))
        if first:
            self.cluster.names.free(self.name)
