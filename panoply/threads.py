"""How a run uses the CPU: how many threads, measured once at its start and stored with it, no denormal numbers, and
memory that stays with it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from panoply.errors import PanoplyError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of `mallopt`: of how many free bytes memory is given back, and from which size on it is asked for alone."""
GAIN = 1.1
"""How much faster all threads must be than one: small operations lose more by waiting than they gain."""


def pick_threads(width: int = 64, rows: int = 1024, device: str = "cpu") -> int:
    """One thread, or as many as torch would take, whichever does a small layer's work faster here and now.

    Beside a GPU it is one: what is left to the processor are small operations, for which sixteen threads took up to
    fifteen times as long as one.
    """
    most = torch.get_num_threads()
    if most == 1 or device != "cpu":
        return 1
    x, w = torch.randn(rows, width), torch.randn(width, 4 * width)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < 0.15:
            torch.softmax(torch.nn.functional.silu(x @ w), -1).sum()
            done += 1
        return (time.perf_counter() - start) / done

    seconds(most)
    alone, together = seconds(1), seconds(most)
    torch.set_num_threads(most)
    return most if alone > GAIN * together else 1


@contextmanager
def with_threads(number: int) -> Iterator[None]:
    """So many CPU threads for a while; 0 leaves torch's own number."""
    if number < 0:
        raise PanoplyError(f"threads must be at least 0, not {number}.")
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def without_denormals() -> Iterator[None]:
    """Numbers below 1e-38 become 0 for a while, where one thread computes: the setting does not reach others.

    What an optimiser keeps of weights that no longer move fades into such numbers, with which a processor takes many
    times as long.
    """
    before = bool((torch.tensor([1e-38]) * 0.1 == 0).item())
    torch.set_flush_denormal(before or torch.get_num_threads() == 1)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def keep_memory() -> None:
    """What is freed stays with this process, of Linux's own allocator, for good: for processes that are Panoply's own.

    A run makes arrays of the same sizes again and again. What it frees lies at the end of its memory and would be given
    back each time: a sampler spent an eighth of its time on that, and beside a GPU it is 2 ms of a step of a second.
    """
    with suppress(OSError, AttributeError):  # another system, or another allocator
        settle = ctypes.CDLL(None).mallopt
        settle(_TRIM_THRESHOLD, 2**30)
        settle(_MMAP_THRESHOLD, 2**29)
