"""Kernels that a pass launches hundreds of times: what Triton asks of their arguments is asked once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor


class Often:
    """A kernel, and what it was compiled to by `kind`: all that a launch's code depends on.

    That is the types, the constants, and whole numbers that Triton may compile in because 16 divides them. A launch of
    Triton's own takes tens of microseconds on the host, longer than a small kernel runs; one through here a few. Where
    a version of Triton launches otherwise, its own way is gone.
    """

    def __init__(self, kernel: Any):
        self.kernel, self.quick = kernel, True
        self._made: dict[Hashable, Any] = {}

    def __call__(self, grid: tuple[int, ...], kind: Hashable, *given: Any, **options: Any) -> None:
        """Launch it with all of its arguments in order."""
        aligned = not any(x.data_ptr() & 15 for x in given if isinstance(x, Tensor))
        made = self._made.get(kind) if aligned and self.quick else None
        if made is not None:
            try:
                made[(*grid, 1, 1)[:3]](*given)
                return
            except (TypeError, AttributeError):  # raised before anything is launched
                self.quick = False
        made = self.kernel[grid](*given, **options)
        if aligned and hasattr(made, "packed_metadata"):  # not while compilation is only asked for
            self._made[kind] = made
