"""Kernels are compiled side by side, and none of them runs in a rehearsal."""

from __future__ import annotations

import _thread
import sys
import threading
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar

import pytest

from panoply.kernels.together import rehearsal


class _Future:
    def __init__(self, future: Any):
        self.future, self.asked = future, False

    def result(self) -> Any:
        self.asked = True
        return self.future.result()


class _Mode:
    def __init__(self, executor: Any):
        self.executor, self.future_kernels = executor, {}  # type: ignore[var-annotated]

    def submit(self, key: str, compile_it: Callable[[], Any]) -> None:
        self.future_kernels[key] = _Future(self.executor.submit(compile_it))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> type:
    """A stand-in for Triton's: a launch compiles, in the mode's threads where there is one, and then runs."""
    active: ContextVar[_Mode | None] = ContextVar("active", default=None)

    class Compiled:
        def __init__(self, name: str):
            self.name = name

        @property
        def run(self) -> None:
            Kernel.together.wait()
            Kernel.loaded.append(self.name)

    class Kernel:
        loaded: ClassVar[list[str]] = []
        ran: ClassVar[list[int]] = []
        compiled: ClassVar[list[str]] = []
        together = threading.Barrier(2, timeout=5)

        def __init__(self, name: str):
            self.name = name

        def run(self, *given: int, grid: tuple[int, ...], warmup: bool) -> None:
            mode = active.get()
            if mode is not None:
                mode.submit(self.name, self.compile)
            if not warmup:
                Kernel.ran.extend(given)

        def compile(self) -> Compiled:
            Kernel.together.wait()  # passes only where two are under way at once
            Kernel.compiled.append(self.name)
            return Compiled(self.name)

    made: dict[str, Any] = {
        "triton": {}, "triton.runtime": {}, "triton.runtime.jit": {"JITFunction": Kernel},
        "triton.runtime._async_compile": {"AsyncCompileMode": _Mode, "active_mode": active},
    }  # fmt: skip
    for name, content in made.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    return Kernel


def test_a_rehearsal_compiles_at_once_and_runs_nothing(kernel: Any) -> None:
    launch = kernel.run
    with rehearsal():
        kernel("one").run(3, grid=(1,), warmup=False)
        over = threading.Event()

        def backward() -> None:
            kernel("other").run(4, grid=(1,), warmup=False)
            over.set()

        _thread.start_new_thread(backward, ())  # one that threading does not know, as those of torch
        assert over.wait(5)
    assert sorted(kernel.compiled) == sorted(kernel.loaded) == ["one", "other"]
    assert kernel.ran == []
    assert kernel.run is launch
    kernel("one").run(5, grid=(1,), warmup=False)
    assert kernel.ran == [5]


def test_another_thread_of_the_program_runs_its_kernels_meanwhile(kernel: Any) -> None:
    with rehearsal():
        sampling = threading.Thread(target=lambda: kernel("other").run(4, grid=(1,), warmup=False))
        sampling.start()
        sampling.join()
    assert kernel.ran == [4]
    assert kernel.compiled == []


def test_what_fails_in_a_rehearsal_leaves_kernels_as_they_were(kernel: Any) -> None:
    launch = kernel.run
    with pytest.raises(ValueError, match="no room"), rehearsal():
        raise ValueError("no room")
    assert kernel.run is launch


def test_without_triton_nothing_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    done = []
    with rehearsal():
        done.append(1)
    assert done == [1]
