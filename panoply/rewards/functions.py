"""A user's reward function in a process of its own, with a time limit: a hang or a crash costs one sample."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from panoply.errors import PanoplyError

Fields = Mapping[str, Sequence[Any]]


class _Failed(Exception):
    """The function raised, returned nonsense, hung or died."""


class RewardFunction:
    """`FILE.py:NAME`, called with batches. Samples on which it fails get None, and `failures` counts why.

    A batch that fails is tried again sample by sample, so that only the guilty ones are lost.
    """

    def __init__(self, source: str, seconds: float = 10.0, start_seconds: float = 60.0):
        file, separator, name = source.rpartition(":")
        if not separator or not Path(file).is_file():
            raise PanoplyError(
                f"A reward function is FILE.py:NAME, and '{source}' names no file that exists."
            )
        self.source, self.file, self.name = source, file, name
        self.seconds, self.start_seconds = seconds, start_seconds
        self.failures: dict[str, int] = {}
        self._process: subprocess.Popen[str] | None = None
        self._start()

    def __call__(self, fields: Fields) -> list[float | None]:
        """One reward a completion, or None."""
        number = len(fields["completions"])
        try:
            return list(self._call(fields))
        except _Failed as error:
            if number == 1:
                self.failures[str(error)] = self.failures.get(str(error), 0) + 1
                return [None]
        return [v for i in range(number) for v in self({k: [column[i]] for k, column in fields.items()})]

    def close(self) -> None:
        if self._process is not None:
            _kill(self._process)
            self._process = None

    # -------------------------------------------------------------- the process

    def _start(self) -> None:
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "panoply.rewards.worker", self.file, self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        weakref.finalize(self, _kill, self._process)
        answer = self._read(self.start_seconds)
        if not answer or "error" in answer:
            why = (
                answer["error"]
                if answer
                else "it did not load"
                if answer == {}
                else "it did not load in time"
            )
            self.close()
            raise PanoplyError(f"The reward function {self.source} cannot be used: {why}.")

    def _call(self, fields: Fields) -> list[float]:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({k: list(v) for k, v in fields.items()}) + "\n")
            self._process.stdin.flush()
        except OSError:
            self._start()
            raise _Failed("its process had died") from None
        answer = self._read(self.seconds)
        if not answer:
            self._start()
            raise _Failed("its process died" if answer == {} else f"it took longer than {self.seconds:g} s")
        if answer.get("fatal"):
            raise PanoplyError(f"The reward function {self.source} cannot be used: {answer['error']}.")
        if "error" in answer:
            raise _Failed(answer["error"])
        values: list[float] = answer["values"]
        return values

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """The next line; None when the time is up, nothing when the process has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        line = self._process.stdout.readline()
        try:
            return json.loads(line) if line else {}
        except ValueError:
            return {}


def _kill(process: subprocess.Popen[str]) -> None:
    """End a worker and whatever it started."""
    import contextlib
    import os
    import signal

    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process.wait(timeout=5)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
