"""The host's side of workers that lock themselves in (`inside/worker.py`): a crew, and a spare."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from panoply.errors import Resumable
from panoply.sandbox.contract import Backend, Ended, Program, Result, Unavailable, cores, decoded

GRACE = 3.0
"""Seconds beyond its own in which a worker has to say what became of a program. One that does not is killed."""
START = 60.0
"""Seconds that a worker has to start."""
Command = Callable[[int, int, bool], list[str]]
"""What starts a worker, by the number of its socket, the size of its disk, and whether the kernel may tie it to the
thread that starts it: to one that lives as long as the process. Any worker ends when the host closes its socket."""


class Worker:
    """One locked process. Programs go in through its input, what they print comes out, and its words have a socket."""

    def __init__(self, command: Command, environment: Mapping[str, str], disk: int):
        self.disk = disk
        self.words, other = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        with other:
            self._process = subprocess.Popen(
                command(other.fileno(), disk, threading.current_thread() is threading.main_thread()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                pass_fds=[other.fileno()],
                env=dict(environment),
                cwd="/",
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        for number in (self.words.fileno(), self._input.fileno(), self._output.fileno()):
            os.set_blocking(number, False)
        self.ready: dict[str, Any] | None = None
        """What it said when it was locked in; None before."""
        self.program: Program | None = None
        self.place = -1
        self.deadline = time.monotonic() + START
        self._heard, self._printed, self._left = bytearray(), bytearray(), memoryview(b"")
        self._flooded = False
        self.end = weakref.finalize(
            self, _end, self._process, os.getpid(), self.words, self._input, self._output, self._errors
        )

    # -------------------------------------------------------------- a program

    def begin(self, place: int, program: Program) -> None:
        self.place, self.program = place, program
        limits = program.limits
        body = json.dumps({"code": program.code, "files": dict(program.files), "stdin": program.stdin})
        payload = body.encode()  # all of ASCII: lone surrogates are escaped
        self._left = memoryview(len(payload).to_bytes(8, "big") + payload)
        self._heard, self._printed, self._flooded = bytearray(), bytearray(), False
        order = {
            "seconds": limits.seconds,
            "memory": limits.memory,
            "disk": limits.disk,
            "files": list(program.files),
        }
        self.deadline = time.monotonic() + limits.seconds + GRACE
        self.words.send(json.dumps(order).encode() + b"\n")

    def files(self) -> list[tuple[int, int]]:
        """The descriptors to wait for, and whether to read or to write."""
        read = [self.words.fileno(), *([] if self._flooded else [self._output.fileno()])]
        return [
            *((number, selectors.EVENT_READ) for number in read),
            *([(self._input.fileno(), selectors.EVENT_WRITE)] if self._left else []),
        ]

    def proceed(self) -> dict[str, Any] | None:
        """Write and read what can be now; the worker's next words, if they are whole. `OSError` where it is gone."""
        with contextlib.suppress(BlockingIOError):
            while self._left:
                self._left = self._left[os.write(self._input.fileno(), self._left) :]
        self._read_output()
        with contextlib.suppress(BlockingIOError):
            while not self._heard.endswith(b"\n"):
                piece = self.words.recv(4096)
                if not piece or len(self._heard) > 2**16:
                    raise OSError("the worker is gone")
                self._heard += piece
        if not self._heard.endswith(b"\n"):
            if time.monotonic() > self.deadline:
                raise OSError("the worker does not answer")
            return None
        self._read_output()  # a program's output is in the pipe before its worker says that it ended
        answer: dict[str, Any] = json.loads(bytes(self._heard))
        self._heard = bytearray()
        return answer

    def _read_output(self) -> None:
        most = self.program.limits.output if self.program else 0
        with contextlib.suppress(BlockingIOError):
            while not self._flooded:
                piece = os.read(self._output.fileno(), 2**16)
                if not piece:
                    return
                self._printed += piece
                if len(self._printed) > most:
                    self._flooded = True
                    self.words.send(b"k")

    def result(self, answer: dict[str, Any]) -> Result:
        """What became of the program, by the worker's words and what was printed here."""
        assert self.program is not None
        said = decoded(bytes(self._printed), self.program.limits.output)
        ended: Ended = "output" if self._flooded else answer["ended"]
        return Result(answer["exit"], ended, said, answer["seconds"], answer["peak"])

    def lost(self, began: float) -> Result:
        """Of a program whose worker is gone."""
        assert self.program is not None
        said = decoded(bytes(self._printed), self.program.limits.output)
        return Result(-9, "output" if self._flooded else "lost", said, time.monotonic() - began, 0)

    def serves_on(self, answer: dict[str, Any]) -> bool:
        """Whether another program may run here: nothing is left of the last one, in its folder, pipes or words."""
        return bool(answer["clean"]) and not self._left and not self._flooded

    def why(self) -> str:
        """What a worker that did not start left behind, in a line."""
        self._errors.seek(0)
        lines = self._errors.read(2**16).decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:200] if lines else "it ended without a word"


class Crew(Backend):
    """Workers that run programs at the same time, and a spare that takes the place of one that is not used again."""

    def __init__(self, command: Command, environment: Mapping[str, str], workers: int = 0):
        self._command, self._environment = command, environment
        self.workers = workers or cores()
        self._idle: deque[Worker] = deque()
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def run_many(self, programs: Sequence[Program]) -> list[Result]:
        if not programs:
            return []
        if os.getpid() != self._owner:  # a fork of the process whose workers these are
            self._idle, self._owner, self._lock = deque(), os.getpid(), threading.Lock()
        with self._lock:
            try:
                return _Batch(self, programs).run()
            except (Unavailable, FileNotFoundError) as problem:
                if self.version:  # it has worked before
                    raise Resumable(f"The sandbox {self.name} works no longer: {problem}.") from problem
                raise Unavailable(str(problem)) from problem

    def close(self) -> None:
        if os.getpid() == self._owner:
            for worker in self._idle:
                worker.end()
        self._idle.clear()

    def try_out(self) -> dict[str, Any]:
        """Start a worker, let it compute, and return what it said of itself; `Unavailable` where it cannot."""
        result = self.run_many([Program("print(6 * 7)")])[0]
        if result.said != "42\n":
            raise Unavailable(f"a program that prints 42 said '{result.said[:200].strip()}'")
        ready = self._idle[0].ready
        assert ready is not None
        return ready

    def worker(self, disk: int) -> Worker:
        """An idle one with such a disk, or a new one, which may still be starting."""
        for worker in list(self._idle):
            if worker.disk == disk:
                self._idle.remove(worker)
                return worker
        while len(self._idle) > self.workers:  # those of other sizes
            self._idle.popleft().end()
        return Worker(self._command, self._environment, disk)

    def keep(self, worker: Worker) -> None:
        self._idle.append(worker)


class _Batch:
    """Programs under way: who runs which, and who waits."""

    def __init__(self, crew: Crew, programs: Sequence[Program]):
        self.crew, self.programs = crew, programs
        self.waiting = deque(enumerate(programs))
        self.results: list[Result | None] = [None] * len(programs)
        self.busy: dict[Worker, float] = {}
        """Workers with a program, and when it began."""
        self.free: list[Worker] = []
        self.failed_starts = 0

    def run(self) -> list[Result]:
        disk = self.programs[0].limits.disk
        number = min(self.crew.workers, len(self.programs))
        self.free = [self.crew.worker(disk) for _ in range(number + (len(self.programs) > number))]
        try:
            while self.waiting or self.busy:
                self._hand_out()
                self._wait()
                for worker in [*self.busy, *(w for w in self.free if w.ready is None)]:
                    self._proceed(worker)
        except BaseException:
            for worker in [*self.busy, *self.free]:
                worker.end()
            raise
        for worker in self.free:
            self.crew.keep(worker)
        return [result for result in self.results if result is not None]

    def _hand_out(self) -> None:
        """Programs to workers that are ready, at most `workers` at a time: the one beside is the spare."""
        while self.waiting and len(self.busy) < self.crew.workers:
            place, program = self.waiting[0]
            ready = [w for w in reversed(self.free) if w.ready is not None]  # the spare waits
            fitting = next((w for w in ready if w.disk == program.limits.disk), None)
            if fitting is None:
                if not ready:
                    return
                self._replace(ready[0], program.limits.disk)
                continue
            self.waiting.popleft()
            self.free.remove(fitting)
            try:
                fitting.begin(place, program)
            except OSError:  # died while it was idle
                self.waiting.appendleft((place, program))
                fitting.end()
                self.free.append(self.crew.worker(program.limits.disk))
                continue
            self.busy[fitting] = time.monotonic()

    def _wait(self) -> None:
        starting = [w for w in self.free if w.ready is None]
        watched = [*self.busy, *starting]
        with selectors.DefaultSelector() as selector:
            for number, event in (file for worker in watched for file in worker.files()):
                selector.register(number, event)
            left = min((w.deadline for w in watched), default=0.0) - time.monotonic()
            selector.select(max(0.0, left) + 0.01)

    def _proceed(self, worker: Worker) -> None:
        try:
            answer = worker.proceed()
        except OSError as problem:
            self._gone(worker, problem)
            return
        if answer is None:
            return
        if worker not in self.busy:
            worker.ready = answer
            return
        self.results[worker.place] = worker.result(answer)
        del self.busy[worker]
        if worker.serves_on(answer):
            self.free.append(worker)
        else:
            self._replace(worker, worker.disk)

    def _replace(self, worker: Worker, disk: int) -> None:
        if worker in self.free:
            self.free.remove(worker)
        worker.end()
        self.free.append(self.crew.worker(disk))

    def _gone(self, worker: Worker, problem: OSError) -> None:
        """A program that took its worker with it has no result; one that never started is a fault of this machine."""
        if worker in self.busy:
            self.results[worker.place] = worker.lost(self.busy.pop(worker))
            self._replace(worker, worker.disk)
            return
        why = worker.why()
        self.failed_starts += 1
        if self.failed_starts > 3:
            raise Unavailable(f"its workers do not start ({why})") from problem
        self._replace(worker, worker.disk)


def _end(process: subprocess.Popen[bytes], owner: int, *files: Any) -> None:
    """Kill a worker with all it has started; files of the host's are closed."""
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            process.wait(timeout=5)
    for file in files:
        with contextlib.suppress(OSError):
            file.close()
