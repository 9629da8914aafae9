"""Monty: a Python of its own, written in Rust, that has no system calls to give away, in processes of its own.

It knows a part of the language: no heapq, no numpy, no files, no input. In return it starts in a fraction of a
millisecond and works on every system. A world says whether that is enough for its programs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from panoply.errors import PanoplyError
from panoply.sandbox.contract import Backend, Program, Result, Unavailable, cores

GRACE = 1.0
"""Seconds after which a process is killed that does not end by itself when its time is over."""

NOTHING = "\n\nNone\n"
"""The value of a program's last line would be made an object here, however large: this is its last line."""


class Monty(Backend):
    """pydantic-monty, a fresh session for every program."""

    name = "monty"

    def __init__(self, workers: int = 0, preload: tuple[str, ...] = ()):
        try:
            import pydantic_monty
        except ImportError:
            raise Unavailable("pydantic-monty is not installed (pip install 'panoply-rl[sandbox]')") from None
        self._module: Any = pydantic_monty
        self.version = f"pydantic-monty {pydantic_monty.__version__}"
        self.workers = workers or cores()
        self._pool: Any = None
        self._threads: ThreadPoolExecutor | None = None
        self._owner = 0
        self._lock = threading.Lock()
        try:
            result = self.run("print(6 * 7)")
        except (OSError, RuntimeError) as problem:
            raise Unavailable(f"its processes do not start ({problem})") from None
        if result.said != "42\n":
            raise Unavailable(f"a program that prints 42 said '{result.said[:200].strip()}'")

    def run_many(self, programs: Sequence[Program]) -> list[Result]:
        if any(program.files or program.stdin for program in programs):
            raise PanoplyError(
                "The sandbox monty has neither files nor input: --sandbox namespaces has both."
            )
        with self._lock:
            pool, threads = self._started()
            if len(programs) == 1:
                return [self._one(pool, programs[0])]
            return list(threads.map(lambda program: self._one(pool, program), programs))

    def close(self) -> None:
        if self._pool is not None and self._owner == os.getpid():
            self._pool.__exit__(None, None, None)
            assert self._threads is not None
            self._threads.shutdown()
            self._pool = self._threads = None

    def _started(self) -> tuple[Any, ThreadPoolExecutor]:
        """Processes and threads of this process. A fork of it has neither, and cannot make them."""
        if self._pool is not None and self._owner != os.getpid():
            raise PanoplyError(
                "The sandbox monty does not work in a fork of the process that started it: start a fresh one."
            )
        if self._pool is None or self._threads is None:
            made = self._module.Monty(
                min_processes=self.workers, max_processes=self.workers, feed_duration_limit_grace=GRACE
            )
            self._pool, self._owner = made.__enter__(), os.getpid()
            self._threads = ThreadPoolExecutor(self.workers)
        return self._pool, self._threads

    def _one(self, pool: Any, program: Program) -> Result:
        limits, said = program.limits, _Said(program.limits.output)
        session = pool.checkout(
            limits={"max_feed_duration_secs": limits.seconds, "max_memory": limits.memory},
            os_policy={"sleep": "zero", "random_start": {"seed": 0}},
            assert_message_annotations=False,
        )
        exit_, ended, began = 0, "", time.monotonic()
        try:
            with session as opened:
                began = time.monotonic()
                opened.feed_run(program.code + NOTHING, print_callback=said)
        except self._module.MontyCrashedError as problem:
            exit_, ended = -9, "time" if problem.timed_out else "lost"
        except self._module.MontyError as problem:
            inner = problem.exception()
            exit_ = 1
            if isinstance(inner, TimeoutError) and time.monotonic() - began >= limits.seconds:
                exit_, ended = -9, "time"
            elif not said.flooded:
                said.add(f"{type(inner).__name__}: {inner}".removesuffix(": ") + "\n")
        if said.flooded:
            exit_, ended = -9, "output"
        return Result(exit_, ended, said.text(), time.monotonic() - began, 0)  # type: ignore[arg-type]


class _Flood(Exception):
    """More was printed than may be."""


class _Said:
    """What is printed, as it comes, up to a limit."""

    def __init__(self, most: int):
        self.most, self.flooded = most, False
        self._found = bytearray()

    def __call__(self, stream: str, text: str) -> None:
        self.add(text)
        if self.flooded:
            raise _Flood

    def add(self, text: str) -> None:
        if not self.flooded:
            self._found += text[: self.most + 1].encode("utf-8", "replace")
            self.flooded = len(self._found) > self.most

    def text(self) -> str:
        return bytes(self._found[: self.most]).decode("utf-8", "replace")
