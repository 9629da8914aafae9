"""Stopping from outside: Ctrl-C, and the signals of a job manager (SIGTERM) or a closed terminal (SIGHUP)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 8.0
"""Seconds that a step may still take after the first signal; those who send SIGTERM often wait for ten."""


class Stopped(KeyboardInterrupt):
    """What a run or command was stopped by, and how to go on with it."""

    def __init__(self, says: str = "stopped", number: int = signal.SIGINT):
        super().__init__(says)
        self.number = int(number)

    @classmethod
    def to_go_on(cls, how: str, stop: KeyboardInterrupt) -> Stopped:
        return cls(f"stopped; {how}", getattr(stop, "number", signal.SIGINT))


def at_once(number: int, frame: FrameType | None) -> None:
    """Stop where the program is. An import can only be left together with the process: half of one breaks the next."""
    if _importing(frame):
        os.write(2, b"panoply: stopped\n")
        os._exit(128 + number)
    raise Stopped(number=number)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


class Patience:
    """Whether a run was asked to stop. Once it has made a step, it stops after the next, with all of it saved.

    Asked twice, or after `PATIENCE`, or before its first step, it stops at once; but not in the midst of an import.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self.stepping = False

    def hear(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = self.asked is None, self.asked or number
        if first and self.stepping:
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        elif _importing(frame):
            signal.setitimer(signal.ITIMER_REAL, 0.02)
        else:
            raise Stopped(number=self.asked)


@contextmanager
def stoppable() -> Iterator[None]:
    """A command: every signal that would end the process raises `Stopped`, so that what it holds is let go."""
    with _handled(at_once, SIGNALS, (signal.SIG_DFL, signal.default_int_handler)):
        yield


@contextmanager
def patient() -> Iterator[Patience]:
    """A run: what would raise now, Ctrl-C or what `stoppable` hears, waits for the end of a step."""
    asked = Patience()
    with (
        _handled(asked.hear, (signal.SIGALRM,), (signal.SIG_DFL,)),
        _handled(asked.hear, SIGNALS, (at_once, signal.default_int_handler)),
    ):
        try:
            yield asked
        finally:
            if asked.asked is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _handled(
    handler: Callable[[int, FrameType | None], Any], numbers: tuple[int, ...], instead_of: tuple[Any, ...]
) -> Iterator[None]:
    """Handle signals for a while, in place of those handlers alone: what is ignored, or someone else's, stays.

    A fork does not inherit it: there a signal does what it did before. Only a main thread can handle any.
    """
    owner, before = os.getpid(), {}

    def here(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            handler(number, frame)
            return
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.raise_signal(number)

    here.handler = handler  # type: ignore[attr-defined]
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            found = signal.getsignal(number)
            if getattr(found, "handler", found) in instead_of:
                before[number] = signal.signal(number, here)
    try:
        yield
    finally:
        for number, found in before.items():
            signal.signal(number, found)
