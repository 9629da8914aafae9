"""What a sandbox is: a program in, what it said out, and how it ended. Nothing here runs anything."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from panoply.errors import PanoplyError

MIB = 2**20
Ended = Literal["", "time", "output", "lost"]


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    seconds: float = 2.0
    """By the clock."""
    memory: int = 512 * MIB
    """Bytes of its address space, the interpreter included; where the sandbox is an interpreter itself, of its heap."""
    output: int = 64 * 1024
    """Bytes that it may print. One that prints more is ended."""
    disk: int = MIB
    """Bytes of all its files."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and 0 < self.seconds <= 3600):
            raise PanoplyError(f"A program may run for up to 3600 seconds, not {self.seconds}.")
        if self.memory < 64 * MIB:
            raise PanoplyError(
                f"A program needs at least 64 MiB of memory to start, not {self.memory / MIB:.3g}."
            )
        if not (0 < self.output <= 64 * MIB and 0 < self.disk <= 1024 * MIB):
            raise PanoplyError("A program may print up to 64 MiB and have files of up to 1024 MiB.")


@dataclass(frozen=True)
class Program:
    """Python source, the files that lie in its folder (by plain names), and what it reads as its input."""

    code: str
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in self.files:
            if name in ("", ".", "..") or len(os.fsencode(name)) > 200 or any(c in name for c in "/\\\0"):
                raise PanoplyError(f"A file of a program has a plain name, not '{name[:80]}'.")


@dataclass(frozen=True)
class Result:
    """What became of a program."""

    exit: int
    """0 where it ran to its end, 1 after an exception that it did not catch; below 0 where it was killed."""
    ended: Ended
    """Empty where it ended itself; `time` and `output` name the limit that it broke; `lost` is one that died."""
    said: str
    """All that it printed, errors among it. An exception that nobody caught is a line `ValueError: …`."""
    seconds: float
    """How long it took, by the clock. The only thing here that does not repeat."""
    peak: int
    """Bytes that it held at most; 0 where nobody knows."""

    @property
    def ok(self) -> bool:
        """Whether it ran to its end. Says nothing of what it said: a program can print anything."""
        return self.exit == 0 and not self.ended


USUAL = Limits()


class Sandbox(Protocol):
    """A place with walls in which programs run that nobody has read."""

    name: str
    version: str

    def run(
        self, code: str, files: Mapping[str, str] = {}, stdin: str = "", limits: Limits = USUAL
    ) -> Result: ...

    def run_many(self, programs: Sequence[Program]) -> list[Result]: ...

    def close(self) -> None: ...


def named(sandbox: Sandbox) -> str:
    """For plans and records."""
    return f"{sandbox.name} ({sandbox.version})"


class Unavailable(Exception):
    """Why a sandbox cannot be had here, and what would bring it: one line."""


class Backend:
    """What all sandboxes share: one program is many of them."""

    name = ""
    version = ""

    def run(
        self, code: str, files: Mapping[str, str] = {}, stdin: str = "", limits: Limits = USUAL
    ) -> Result:
        """Run a program and wait for its end, which its limits bring about at the latest."""
        return self.run_many([Program(code, files, stdin, limits)])[0]

    def run_many(self, programs: Sequence[Program]) -> list[Result]:
        """Results in the order of programs, which run at the same time, as many as there are workers."""
        raise NotImplementedError

    def close(self) -> None:
        """End all that was started; a sandbox that is used again starts again."""


def decoded(said: bytes, most: int) -> str:
    """What was printed, up to a limit, as text whatever it was."""
    return said[:most].decode("utf-8", "replace")


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
