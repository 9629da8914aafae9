"""Gymnasium environments in processes of their own: slow ones run side by side, and a crash costs few episodes."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from panoply.errors import PanoplyError
from panoply.worlds.control.world import Array, Box, Discrete, Envs, Step

if TYPE_CHECKING:
    from panoply.worlds.control.gymnasium import Gymnasium

STEP, RESET, CLOSE = b"step", b"reset", b"close"
ATTEMPTS = 3
"""How often a worker that does not even begin its episodes is started again."""
LOOK = 5.0
"""Seconds after which an idle worker looks whether the run is still there."""


class WorkerEnvs(Envs):
    """Rows shared out over processes, each of which steps its own just as they are stepped in this process.

    Numbers travel through shared memory; a pipe says when to go on. A worker that dies, or does not answer in
    `patience` seconds, is replaced: its episodes end where they were last seen (truncated), which is counted and said
    like any other failure of an environment.
    """

    def __init__(self, world: Gymnasium, size: int, workers: int, patience: float):
        self.world, self.size, self.patience = world, size, patience
        self._shared = _columns(world, size)
        self.observations = self._shared["observations"].copy()
        shares = np.array_split(np.arange(size), min(workers, size))
        self._workers = [_Worker(world, rows, self._shared) for rows in shares]
        self._failures: dict[str, int] = {}

    def reset(self, where: Array, seeds: Array) -> None:
        wanted = self._shared["wanted"]
        wanted[:] = False
        wanted[where], self._shared["seeds"][where] = True, seeds
        asked = [worker for worker in self._workers if wanted[worker.rows].any()]
        for attempt in range(1, ATTEMPTS + 1):
            asked = self._ask(RESET, asked)
            if not asked:
                break
            if attempt == ATTEMPTS:
                raise PanoplyError(
                    f"A worker process of {self.world.env} ends whenever it begins an episode: try world.workers=0."
                )
        self._see(where)

    def step(self, actions: Array) -> Step:
        shared = self._shared
        shared["actions"][:] = actions
        lost, whole = self._ask(STEP, self._workers), np.ones(self.size, dtype=bool)
        reward, terminated, truncated = (
            shared[name].copy() for name in ("reward", "terminated", "truncated")
        )
        for worker in lost:
            rows = worker.rows
            reward[rows], terminated[rows], truncated[rows], whole[rows] = 0.0, False, True, False
        self._see(whole.nonzero()[0])
        return Step(reward, terminated, truncated)

    def _see(self, rows: Array) -> None:
        """Take over what is shown in some rows; what a lost worker has left half-written never is."""
        self.observations[rows] = self._shared["observations"][rows]
        if self._shared["masked"].any():
            self.masks = np.ones_like(self._shared["masks"]) if self.masks is None else self.masks
            self.masks[rows] = self._shared["masks"][rows]

    def _ask(self, what: bytes, workers: list[_Worker]) -> list[_Worker]:
        """Let workers do something side by side; those that did not come back have been started again."""
        for worker in workers:
            worker.send(what)
        lost = []
        for worker in workers:
            found, why = worker.answer(self.patience)
            for said, times in (found if why is None else {f"{self.world.env}: {why}": 1}).items():
                self._failures[said] = self._failures.get(said, 0) + times
            if why is not None:
                worker.restart()
                lost.append(worker)
        return lost

    def failures(self) -> dict[str, int]:
        return dict(self._failures)

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()


class _Worker:
    """One process, and the rows whose environments it holds."""

    def __init__(self, world: Gymnasium, rows: Array, shared: dict[str, Array]):
        self.world, self.rows, self._shared = world, rows, shared
        if "fork" not in multiprocessing.get_all_start_methods():
            raise PanoplyError("Worker processes need a system that can fork: leave world.workers at 0.")
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context(
            "fork"
        )  # so that it knows what was registered, and shares the arrays
        self.pipe, theirs = context.Pipe()
        mine = {name: column[self.rows[0] : self.rows[-1] + 1] for name, column in self._shared.items()}
        self.process = context.Process(
            target=_work, args=(self.world, mine, theirs, os.getpid()), daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, what: bytes) -> None:
        with suppress(OSError):  # it has died: the answer will say so
            self.pipe.send_bytes(what)

    def answer(self, patience: float) -> tuple[dict[str, int], str | None]:
        """What failed inside environments; and why there is no answer, if there is none."""
        ready = wait([self.pipe, self.process.sentinel], patience)
        if not ready:
            return {}, f"a worker process did not answer for {patience:g} s and was replaced"
        try:
            told = self.pipe.recv_bytes() if self.pipe.poll() else None
        except (EOFError, OSError):
            told = None
        if told is None:
            return {}, "a worker process died and was replaced"
        return (json.loads(told) if told else {}), None

    def restart(self) -> None:
        self.stop(0.0)
        self._start()

    def stop(self, patience: float = 2.0) -> None:
        self.send(CLOSE)
        self.pipe.close()
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _columns(world: Gymnasium, size: int) -> dict[str, Array]:
    """Arrays that this process and its workers see alike."""
    see, act = world.observation, world.action
    kinds: dict[str, tuple[Any, tuple[int, ...]]] = {
        "observations": (np.int64 if isinstance(see, Discrete) else np.float32, see.shape),
        "actions": (np.float32 if isinstance(act, Box) else np.int64, act.shape),
        "reward": (np.float64, ()),
        "terminated": (np.bool_, ()),
        "truncated": (np.bool_, ()),
        "masks": (np.bool_, (act.n if isinstance(act, Discrete) else 0,)),
        "masked": (np.bool_, ()),
        "wanted": (np.bool_, ()),
        "seeds": (np.int64, ()),
    }
    made = {}
    for name, (kind, shape) in kinds.items():
        count = size * int(np.prod(shape))
        memory = multiprocessing.RawArray("b", max(1, count * np.dtype(kind).itemsize))
        made[name] = np.frombuffer(memory, kind, count).reshape(size, *shape)
    return made


def _work(world: Gymnasium, shared: dict[str, Array], pipe: Connection, parent: int) -> None:
    """What a worker does until it is told to stop, or until nobody is there to tell it."""
    from panoply.worlds.control.gymnasium import GymnasiumEnvs

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides what happens then
    envs = GymnasiumEnvs(world, [world.make() for _ in shared["reward"]])
    while os.getppid() == parent:
        try:
            if not pipe.poll(LOOK):
                continue
            what = pipe.recv_bytes()
        except (EOFError, OSError):
            break
        if what == CLOSE:
            break
        if what == RESET:
            where = shared["wanted"].nonzero()[0]
            envs.reset(where, shared["seeds"][where])
        else:
            step = envs.step(shared["actions"])
            shared["reward"][:], shared["terminated"][:], shared["truncated"][:] = step[:3]
        shared["observations"][:] = envs.observations
        if envs.masks is not None:
            shared["masks"][:], shared["masked"][:] = envs.masks, True
        pipe.send_bytes(json.dumps(found).encode() if (found := envs.told()) else b"")
    envs.close()
