"""Kernels compiled for GPUs that are not here (`make test-kernels`): what the interpreter runs, the compiler must take.

Every test of `interpreted.py` is called, in float32 and in half precision, with a launcher that only compiles; what it
says of results means nothing then.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import triton
from kernels import interpreted
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from panoply.kernels import decode, quantised
from panoply.kernels.launching import Often

TESTS = {name: f for name, f in vars(interpreted).items() if name.startswith("test_")}
ARCHITECTURES = [80, 90]


class NoGPU:
    """As much of a driver as compiling asks for."""

    def __init__(self, architecture: int):
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        """Another for every architecture: Triton looks at what it compiles for once a device."""
        return self.architecture

    def get_current_stream(self, _: int) -> int:
        return 0


def cases(test: Any) -> Iterator[dict[str, Any]]:
    """The arguments a test is called with, of all its parameters together."""
    of_each = []
    for mark in getattr(test, "pytestmark", []):
        names, values = mark.args
        names = [names] if isinstance(names, str) else names
        lists = [value if len(names) > 1 else (value,) for value in values]
        of_each.append([dict(zip(names, value, strict=True)) for value in lists])
    for chosen in itertools.product(*of_each):
        yield {name: value for part in chosen for name, value in part.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TESTS)
def test_the_compiler_takes_it(
    name: str, dtype: torch.dtype, architecture: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, compiled = JITFunction.run, []

    def only_compile(kernel: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del grid, warmup
        compiled.append(launch(kernel, *given, grid=(1,), warmup=True, **options))

    def often(self: Often, grid: Any, _: Any, *given: Any, **options: Any) -> None:
        self.kernel[grid](*given, **options)

    triton.runtime.driver.set_active(NoGPU(architecture))
    monkeypatch.setattr(JITFunction, "run", only_compile)
    monkeypatch.setattr(Often, "__call__", often)
    monkeypatch.setattr(interpreted, "close", lambda *_: None)
    for module in (decode, quantised):
        monkeypatch.setattr(module, "chained", lambda: architecture >= 90)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        for case in cases(TESTS[name]):
            more = {"monkeypatch": monkeypatch} if "monkeypatch" in TESTS[name].__code__.co_varnames else {}
            with suppress(AssertionError):
                TESTS[name](**case, **more)
    finally:
        torch.set_default_dtype(before)
    assert compiled
