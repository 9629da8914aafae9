"""Kernels that a pass launches hundreds of times: what Triton asks of their arguments is asked once."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor


@functools.cache
def room() -> int:
    """Bytes of shared memory that a program may have: 227 KB on an H200, 99 on cards for desktops."""
    if not torch.cuda.is_available():
        return 227 * 1024
    from triton.runtime import driver

    held = driver.active.utils.get_device_properties(torch.cuda.current_device())
    return int(held["max_shared_mem"])


class Often:
    """A kernel, and what it was compiled to by `kind`: all that a launch's code depends on.

    That is the types, the constants, and whole numbers that Triton may compile in because 16 divides them. A launch of
    Triton's own takes tens of microseconds on the host, longer than a small kernel runs; one through here a few, and no
    hooks are called. Where a version of Triton launches otherwise, its own way is gone.
    """

    def __init__(self, kernel: Any):
        self.kernel, self.quick = kernel, True
        self._made: dict[Hashable, Any] = {}
        self._tensors: tuple[int, ...] = ()
        """Which arguments are tensors, of every launch the same."""

    def __call__(self, grid: tuple[int, ...], kind: Hashable, *given: Any, **options: Any) -> None:
        """Launch it with all of its arguments in order, a tensor first."""
        made = self._made.get(kind)
        if made is not None and self._aligned(given):
            run, function, packed = made
            x, y, z = (*grid, 1, 1)[:3]
            try:
                stream = torch._C._cuda_getCurrentRawStream(given[0].device.index)
                run(x, y, z, stream, function, packed, None, None, None, *given)
                return
            except (TypeError, AttributeError):  # raised before anything is launched
                self.quick = False
                self._made.clear()
        compiled = self.kernel[grid](*given, **options)
        self._tensors = tuple(i for i, x in enumerate(given) if isinstance(x, Tensor))
        really = self.quick and hasattr(compiled, "packed_metadata")  # and compilation is not only asked for
        if really and self._aligned(given):
            self._made[kind] = compiled.run, compiled.function, compiled.packed_metadata

    def _aligned(self, given: tuple[Any, ...]) -> bool:
        for i in self._tensors:  # noqa: SIM110 (asked at every launch, and `all` takes twice as long)
            if given[i].data_ptr() & 15:
                return False
        return True


def power_above(n: int) -> int:
    """The least power of two that is no less; Triton's own takes as long as a small kernel."""
    return 1 << (n - 1).bit_length()


def parts_of(n: int, size: int) -> int:
    """How many parts of a size hold n."""
    return -(-n // size)
