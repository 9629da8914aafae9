"""Tensors that lie one after another in memory, so that one tensor over all of them is an operand of one product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def adjoin(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor over all of these, in order, of which they become views where they are none yet.

    From then on an update of either is an update of both.
    """
    first, lengths = tensors[0], [len(tensor) for tensor in tensors]
    if not _adjacent(tensors):
        whole = torch.cat([tensor.data for tensor in tensors])
        for tensor, part in zip(tensors, torch.split(whole, lengths), strict=True):
            tensor.data = part
    shape = (sum(lengths), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def _adjacent(tensors: Sequence[Tensor]) -> bool:
    storage, end = tensors[0].untyped_storage().data_ptr(), tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != storage or tensor.data_ptr() != end:
            return False
        end += tensor.nbytes
    return all(tensor.is_contiguous() for tensor in tensors)
