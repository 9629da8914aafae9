"""Weights of few bits made whole, and merged with low-rank factors, in one pass over memory."""
# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 32, 128
"""Of a weight that one program makes."""


@triton.jit
def _restore(
    codes, scales, levels, a, b, out, scale, outputs, inputs, rank,
    FOUR: tl.constexpr, SHARED: tl.constexpr, RANK: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < outputs)[:, None] & (column < inputs)[None, :]
    at = row.to(tl.int64)[:, None] * inputs + column[None, :]
    if FOUR:
        pair = tl.load(codes + at // 2, mask=inside, other=0).to(tl.int32)
        share = tl.load(levels + tl.where(at % 2 == 0, pair >> 4, pair & 15))
    else:
        share = tl.load(codes + at, mask=inside, other=0).to(tl.float32) / 127
    whole = share * tl.load(scales + at // SHARED, mask=inside, other=0.0)
    if RANK > 0:
        one = tl.arange(0, RANK)
        left = tl.load(
            b + row[:, None] * rank + one[None, :],
            mask=(row < outputs)[:, None] & (one < rank)[None, :],
            other=0.0,
        )
        right = tl.load(
            a + one[:, None] * inputs + column[None, :],
            mask=(one < rank)[:, None] & (column < inputs)[None, :],
            other=0.0,
        )
        whole += scale * tl.dot(left, right, input_precision="ieee" if EXACT else "tf32")
    tl.store(out + at, whole.to(out.dtype.element_ty), mask=inside)


def restore(
    codes: Tensor,
    scales: Tensor,
    levels: Tensor | None,
    shared: int,
    out: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    scale: float = 0.0,
) -> None:
    """Write level · scale + s·B·A into `out` [outputs, inputs], whose rows lie one after another.

    levels   the numbers that codes of four bits stand for; None where codes are 127ths
    shared   weights that share a scale
    """
    outputs, inputs = out.shape
    rank = 0 if a is None else len(a)
    _restore[(triton.cdiv(outputs, ROWS), triton.cdiv(inputs, COLUMNS))](
        codes, scales, codes if levels is None else levels, scales if a is None else a, scales if b is None else b,
        out, scale, outputs, inputs, rank,
        FOUR=levels is not None, SHARED=shared, RANK=max(16, triton.next_power_of_2(rank)) if rank else 0,
        EXACT=out.dtype == torch.float32, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
