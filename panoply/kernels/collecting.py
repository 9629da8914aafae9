"""Many tensors added to as many others in one kernel: a model's gradients, of which a micro-batch has hundreds."""
# mypy: disable-error-code="import-not-found,no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803 (constants of a kernel are in capitals)

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from panoply.experience import moved

BLOCK = 4096
GRAIN = 16
"""Numbers of a tensor come in whole grains, and begin at addresses of such, so that they are read many at a time."""
KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["fresh"])
def _add_all(places, owner, first, sizes, count, fresh, KIND: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.load(owner + tl.program_id(0))
    low = tl.multiple_of(tl.load(first + tl.program_id(0)), 16)
    size = tl.multiple_of(tl.load(sizes + index), 16)
    part = tl.multiple_of(tl.load(places + index).to(tl.pointer_type(KIND)), 16)
    total = tl.multiple_of(tl.load(places + count + index).to(tl.pointer_type(tl.float32)), 16)
    at = low + tl.arange(0, BLOCK)
    value = tl.load(part + at, mask=at < size, other=0.0).to(tl.float32)
    value += tl.load(total + at, mask=(at < size) & (fresh == 0), other=0.0)
    tl.store(total + at, value, mask=at < size)


@functools.lru_cache(maxsize=16)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of every program its tensor, and where in it it begins; and the tensors' sizes."""
    size = torch.tensor(sizes)
    programs = (size + BLOCK - 1) // BLOCK
    owner = torch.arange(len(sizes)).repeat_interleave(programs)
    first = (torch.arange(len(owner)) - (programs.cumsum(0) - programs)[owner]) * BLOCK
    return moved(owner.int(), device), moved(first, device), moved(size, device)


def fits(part: Tensor, total: Tensor | None = None) -> bool:
    """Whether a tensor may be among those that are added, to a `total` if there is one already; one that lies in
    pieces has no address of its own."""
    plain = type(part) is Tensor and part.is_cuda and part.dtype in KINDS and part.is_contiguous()
    placed = all(x.data_ptr() % GRAIN == 0 for x in (part, total) if x is not None)
    return plain and placed and part.numel() % GRAIN == 0


def add_all(totals: Sequence[Tensor], parts: Sequence[Tensor], fresh: bool) -> None:
    """totals += parts, of one narrow type each that `fits`, in float32; where these are fresh, totals = parts."""
    owner, first, sizes = _blocks(tuple(part.numel() for part in parts), parts[0].device)
    places = torch.tensor([x.data_ptr() for x in (*parts, *totals)])
    _add_all[(len(owner),)](
        moved(places, owner.device), owner, first, sizes, len(parts), int(fresh),
        KIND=KINDS[parts[0].dtype], BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
