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

from panoply.kernels import attention, cut, decode, experts, quantised, sample
from panoply.kernels.launching import Often
from panoply.kernels.low_rank import Stack
from panoply.policies.attention import Focus
from panoply.policies.packing import pack
from panoply.policies.quantised import Quantised

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


DESK = 86, 99 * 1024
"""Cards for desktops (RTX 30 and later): their architecture, and the bytes of shared memory that a program may have."""


@pytest.fixture
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What launches have compiled from now on, for the architecture that a test has as its parameter."""
    architecture = request.getfixturevalue("architecture")
    launch, made = JITFunction.run, []

    def only_compile(kernel: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del grid, warmup
        made.append(launch(kernel, *given, grid=(1,), warmup=True, **options))

    def often(self: Often, grid: Any, _: Any, *given: Any, **options: Any) -> None:
        self.kernel[grid](*given, **options)

    triton.runtime.driver.set_active(NoGPU(architecture))
    monkeypatch.setattr(JITFunction, "run", only_compile)
    monkeypatch.setattr(Often, "__call__", often)
    for module in (decode, quantised):
        monkeypatch.setattr(module, "chained", lambda: architecture >= 90)
    return made


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TESTS)
def test_the_compiler_takes_it(
    name: str,
    dtype: torch.dtype,
    architecture: int,
    compiled: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interpreted, "close", lambda *_: None)
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


@pytest.mark.parametrize("architecture", [DESK[0]])
def test_programs_have_room_on_cards_for_desktops(
    architecture: int, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision, with heads, ranks and vocabularies of published models."""
    monkeypatch.setattr(decode, "room", lambda: DESK[1])
    half: dict[str, Any] = {"dtype": torch.bfloat16}
    nobody, packing = torch.zeros(16, dtype=torch.long), pack(*torch.tensor([[37, 50], [0, 1], [0, 0]]))
    for heads, shared, size, cap in ((14, 2, 64, 0.0), (28, 4, 128, 0.0), (8, 4, 256, 50.0)):
        focus = Focus(cap=cap)
        row, both = (torch.empty(87, n, size, **half) for n in (heads, heads + 2 * shared))
        out, lse = attention.forward(both, heads, packing, focus)
        attention.backward(row, both, heads, out, lse, packing, focus, torch.empty_like(row))
        kept = torch.empty(2, 96, shared, size, **half)
        for rows in (16, decode.MANY):
            at, new = torch.zeros(rows, dtype=torch.long), torch.empty(rows, both[0].numel(), **half)
            given = (torch.empty(96, size, **half), kept, kept, at, (at, at), None)
            decode.decode_attention(new, *given, decode.Stream(1e-6), focus)
    held = Quantised(torch.randn(256, 1024).to(**half), "int8").held
    for rank in (16, 128, 256, 512):
        stack = Stack(*(torch.empty(n, **half) for n in ((rank, 1024), (rank, 1024), (256, rank))), (), ())
        quantised.few_product(torch.empty(128, 1024, **half), held, stack, None)
    weight, choices = torch.empty(64, 768, 896, **half), torch.zeros(8, 9216, dtype=torch.long)
    few, plan = experts.Table.of(16, 8, 64, "cpu"), experts.plan(choices, 64)
    _, quick = experts.choose(torch.empty(16, 64), 8, True, few)
    for listed, tokens in ((plan, 9216), (quick, 16)):
        experts.product(torch.empty(tokens, 896, **half), weight, None, listed, 8 * tokens, few=tokens < 99)
    slopes = torch.empty(8 * 9216, 768, **half), torch.empty(9216, 896, **half)
    experts.slope(*slopes, plan, weight)
    state, record = sample.State.empty(16, 64, "cpu"), sample.Record.empty(2, 16, "cpu", cuts=True)
    rule, stops = cut.Rule.empty("cpu").set(50, 0.9, 0.1), nobody.new_zeros(151936).bool()
    sample.draw_and_move(torch.empty(16, 151936), torch.ones(65), stops, state, record, 1, 2, rule)
    used = sorted((kernel.metadata.shared, kernel.metadata.name) for kernel in compiled)
    assert len({name for _, name in used}) > 10
    assert used[-1][0] <= DESK[1], used[-5:]
