"""Kernels compiled side by side: what a pass will need is asked for in a rehearsal, in which no kernel runs.

Triton compiles a kernel when it is first launched, so that a first step compiles twenty of them one after another.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

THREADS = 16
_one = threading.Lock()


@contextmanager
def rehearsal() -> Iterator[None]:
    """Inside, a launch of a kernel has it compiled by a thread and does nothing else; at the end all are there.

    What kernels would have written is whatever lay there, so results of a rehearsal mean nothing. Where Triton cannot
    compile beside the program, kernels are compiled and run as ever.
    """
    try:
        from triton.runtime._async_compile import AsyncCompileMode, active_mode
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield
        return
    launch = JITFunction.run
    with _one, _threads() as pool:
        mode = AsyncCompileMode(pool)

        def compiled(kernel: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            before = active_mode.set(mode)  # in whichever thread: backward passes have their own
            try:
                return launch(kernel, *given, grid=grid, warmup=True, **options)
            finally:
                active_mode.reset(before)

        JITFunction.run = compiled
        try:
            yield
        finally:
            JITFunction.run = launch
            kernels = [future.result() for future in list(mode.future_kernels.values())]
        list(pool.map(_load, kernels))


def _threads() -> ThreadPoolExecutor:
    """Threads that stand on the GPU that this one stands on."""
    count = min(THREADS, os.cpu_count() or 1)
    if not torch.cuda.is_available():
        return ThreadPoolExecutor(count)
    return ThreadPoolExecutor(
        count, initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)
    )


def _load(kernel: Any) -> None:
    """Have the function made that launches a kernel: C code, which takes as long to compile as the kernel itself."""
    _ = kernel.run
