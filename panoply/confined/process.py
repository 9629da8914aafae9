"""A process of its own for what may hang, crash or take too much: asked over pipes, each answer with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Collection, Sequence
from typing import Any

from panoply.confined.limits import Limits

MOST_BYTES = 64 * 2**20
"""Of one answer."""


class Failed(Exception):
    """No answer; the process has been ended. The message says why."""


class TookTooLong(Failed):
    """There was no whole answer in time."""


class Confined:
    """`MODULE:FUNCTION` in a process with limits (see `child.py`), one question at a time; a dead one starts again."""

    def __init__(
        self,
        target: str,
        arguments: Sequence[Any] = (),
        limits: Limits | None = None,
        start_seconds: float = 60.0,
    ):
        self.target, self.arguments = target, list(arguments)
        self.limits, self.start_seconds = limits or Limits(), start_seconds
        self.not_limited: list[str] = []
        """What this system does not let one limit, a phrase each; known once it has started."""
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: weakref.finalize[..., Confined] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ask(self, question: Any, seconds: float) -> dict[str, Any]:
        """The answer to one question, or `Failed`."""
        asked = self.begin(question, seconds)
        wait([asked])
        return asked.result()

    def begin(self, question: Any, seconds: float) -> Asked:
        """Ask without waiting; `wait` waits for several at once."""
        if not self.alive:
            self.start()
        return self._asked(question, seconds)

    def start(self) -> None:
        """A fresh process, ready to be asked; `Failed` where it does not get so far."""
        self.end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "panoply.confined.child", self.target, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._ended = weakref.finalize(self, _end, self._process, os.getpid())
        order = {"limits": self.limits.to_json(), "arguments": self.arguments}
        asked = self._asked(order, self.start_seconds)
        wait([asked])
        answer = asked.result()
        if "error" in answer:
            self.end()
            raise Failed(str(answer["error"]))
        self.not_limited = list(answer.get("not_limited", ()))

    def _asked(self, question: Any, seconds: float) -> Asked:
        assert self._process is not None
        return Asked(self, self._process, question, seconds)

    def end(self) -> None:
        """Kill it and whatever it has started."""
        if self._ended is not None:
            self._ended()  # once, for another group may have its number later
        self._process = self._ended = None


class Asked:
    """A question under way: bytes still to be written, bytes read so far, and the time by which all must be here."""

    def __init__(self, confined: Confined, process: subprocess.Popen[bytes], question: Any, seconds: float):
        assert process.stdin is not None
        assert process.stdout is not None
        self.confined, self.seconds = confined, seconds
        self.deadline = time.monotonic() + seconds
        self._input, self._output = process.stdin.fileno(), process.stdout.fileno()
        self._left = memoryview(json.dumps(question).encode() + b"\n")
        self._read = bytearray()
        self._answer: dict[str, Any] | Failed | None = None
        for number in (self._input, self._output):
            os.set_blocking(number, False)

    @property
    def done(self) -> bool:
        return self._answer is not None

    def result(self) -> dict[str, Any]:
        assert self._answer is not None
        if isinstance(self._answer, Failed):
            raise self._answer
        return self._answer

    def files(self) -> list[tuple[int, int]]:
        """The descriptors to wait for, and whether to read or to write."""
        return [
            (self._output, selectors.EVENT_READ),
            *([(self._input, selectors.EVENT_WRITE)] if self._left else []),
        ]

    def proceed(self) -> None:
        """Write and read what can be now; a line is an answer."""
        try:
            self._answer = self._exchange()
            if self._answer is None and time.monotonic() >= self.deadline:
                raise TookTooLong(f"it took longer than {self.seconds:g} s")
        except OSError:
            self._fail(Failed("its process died"))
        except Failed as why:
            self._fail(why)

    def _exchange(self) -> dict[str, Any] | None:
        with contextlib.suppress(BlockingIOError):
            while self._left:
                self._left = self._left[os.write(self._input, self._left) :]
        with contextlib.suppress(BlockingIOError):
            while not self._read.endswith(b"\n"):
                piece = os.read(self._output, 2**16)
                if not piece:
                    raise Failed("its process died")
                self._read += piece
                if len(self._read) > MOST_BYTES:
                    raise Failed(f"its answer is longer than {MOST_BYTES >> 20} MiB")
            return self._parsed()
        return None

    def _parsed(self) -> dict[str, Any]:
        try:
            answer = json.loads(bytes(self._read))
        except (ValueError, RecursionError):
            answer = None
        return answer if isinstance(answer, dict) else {"error": "its answer cannot be read"}

    def _fail(self, why: Failed) -> None:
        """Give up on this answer, and on the process, which is in the midst of it."""
        self._answer = why
        self.confined.end()


def wait(asked: Collection[Asked], first: bool = False) -> list[Asked]:
    """Wait until all questions have an answer or none in time, or until the `first` has; returns those."""
    while True:
        for one in asked:
            if not one.done:
                one.proceed()
        ready = [one for one in asked if one.done]
        if len(ready) == len(asked) or (first and ready):
            return ready
        with selectors.DefaultSelector() as selector:
            left = [one for one in asked if not one.done]
            for number, event in (file for one in left for file in one.files()):
                selector.register(number, event)
            selector.select(max(0.0, min(one.deadline for one in left) - time.monotonic()))


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the one that started it
        return
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process.wait(timeout=5)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
