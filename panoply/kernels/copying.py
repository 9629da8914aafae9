"""Keys and values of many rows and all layers in one kernel: to call a copy a layer takes longer than the copies."""
# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from panoply.kernels.launching import parts_of, power_above

TOKENS = 16
"""Tokens that a program copies."""


class Tokens(NamedTuple):
    """Keys and values [layers, tokens, kv_heads, size], whatever lies between two tokens or two layers."""

    keys: Tensor
    values: Tensor


@triton.jit
def _copy(
    from_keys, from_values, first, count, to_keys, to_values, at, layer_stride, stride, to_layer_stride, to_stride,
    capacity, width, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    item, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    token, column = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    there = (token < tl.load(count + item))[:, None] & (column < width)[None, :]
    source = (tl.load(first + item) + token)[:, None] * stride + layer * layer_stride + column[None, :]
    target = (
        (tl.load(at + item) * capacity + token)[:, None] * to_stride
        + layer * to_layer_stride
        + column[None, :]
    )
    tl.store(to_keys + target, tl.load(from_keys + source, mask=there), mask=there)
    tl.store(to_values + target, tl.load(from_values + source, mask=there), mask=there)


def copy(
    source: Tokens, first: Tensor, count: Tensor, target: Tokens, at: Tensor, capacity: int, longest: int
) -> None:
    """Copy `count[i]` tokens from `first[i]` on to the beginning of row `at[i]` of a target with rows of `capacity`.

    No row is read and written at once. `longest` is no less than any count.
    """
    layers, _, heads, size = source.keys.shape
    width = heads * size
    strides = (*source.keys.stride()[:2], *target.keys.stride()[:2])
    _copy[(len(at), parts_of(longest, TOKENS), layers)](
        source.keys, source.values, first, count, target.keys, target.values, at, *strides, capacity, width,
        TOKENS, power_above(width), num_warps=4,
    )  # fmt: skip
