"""Kernels compiled side by side: what a pass will need is asked for in a rehearsal, in which no kernel runs.

Triton compiles a kernel when it is first launched, so that a first step compiles twenty of them one after another. And
before the first of all it reads itself whole, and compiles what talks to the driver: `begin` lets a thread do that
while a model is opened.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

THREADS = 16
_one = threading.Lock()


@cache
def begin() -> threading.Thread:
    """Have a thread do what Triton does once in a process, most of a second."""
    thread = threading.Thread(target=_get_ready, daemon=True)
    thread.start()
    return thread


def _get_ready() -> None:
    with suppress(Exception):  # told when it is needed
        from triton.runtime import driver
        from triton.runtime.cache import triton_key

        _ = driver.active.utils
        triton_key()


@contextmanager
def rehearsal() -> Iterator[None]:
    """Inside, a launch of a kernel has it compiled by a thread and does nothing else; at the end all are there.

    What kernels would have written is whatever lay there, so results of a rehearsal mean nothing. Other threads of the
    program, which may sample meanwhile, launch as ever. Where Triton cannot compile beside the program, kernels are
    compiled and run as ever.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    launch = JITFunction.run
    begin().join()
    with _one, _threads() as pool:
        mode, owner = AsyncCompileMode(_Whole(pool)), threading.current_thread()

        def compiled(kernel: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            thread = threading.current_thread()
            if thread is not owner and not isinstance(thread, threading._DummyThread):
                return launch(kernel, *given, grid=grid, warmup=warmup, **options)
            before = active_mode.set(
                mode
            )  # also in threads that Python has not begun: backward passes have their own
            try:
                return launch(kernel, *given, grid=grid, warmup=True, **options)
            finally:
                active_mode.reset(before)

        JITFunction.run = compiled
        try:
            yield
        finally:
            JITFunction.run = launch
            for kernel in list(mode.future_kernels.values()):
                kernel.result()


def _threads() -> ThreadPoolExecutor:
    """Threads that stand on the GPU that this one stands on."""
    count = min(THREADS, os.cpu_count() or 1)
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(count)
    return ThreadPoolExecutor(
        count, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)
    )


class _Whole:
    """Threads in which a kernel is done when it can be launched: that takes C code, as long to compile as itself."""

    def __init__(self, pool: ThreadPoolExecutor):
        self.pool = pool

    def submit(self, compiled: Callable[[], Any]) -> Future[Any]:
        return self.pool.submit(_launchable, compiled)


def _launchable(compiled: Callable[[], Any]) -> Any:
    kernel = compiled()
    _ = kernel.run  # made when it is first looked at
    return kernel
