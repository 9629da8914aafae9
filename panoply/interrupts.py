"""Ctrl-C is never lost: where Python drops it, in a destructor or a library's callback, the next step stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_asked = threading.Event()


@contextmanager
def noted() -> Iterator[None]:
    """While this lasts, an interrupt is remembered besides being raised. Others' handlers are left alone."""
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _asked.clear()
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _asked.clear()


def _note(number: int, frame: FrameType | None) -> None:
    _asked.set()
    raise KeyboardInterrupt


def check() -> None:
    """Raise an interrupt that was dropped."""
    if _asked.is_set():
        raise KeyboardInterrupt
