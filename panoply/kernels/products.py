"""Matrix products whose sums keep more bits than their operands, and whether kernels can be had at all."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product in the operands' dtype, given in at least float32."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.is_cuda and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return (a @ b).to(wide)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b, the sum in `total`'s dtype."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += wide_product(a, b)
