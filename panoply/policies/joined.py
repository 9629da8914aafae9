"""Layers that share their input as one matrix product, without a copy of their weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def joined(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """The layers' weights and biases as one tensor each, of which the layers' own become views.

    That is done once; from then on an update of either is an update of both.
    """
    biases: list[Tensor] = [layer.bias for layer in layers]
    weight = _joined([layer.weight for layer in layers])
    return weight, None if biases[0] is None else _joined(biases)


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    first = parameters[0]
    lengths = [len(p) for p in parameters]
    if not _adjacent(parameters):
        whole = torch.cat([p.data for p in parameters])
        for parameter, part in zip(parameters, torch.split(whole, lengths), strict=True):
            parameter.data = part
    shape = (sum(lengths), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def _adjacent(parameters: Sequence[Tensor]) -> bool:
    storage, end = parameters[0].untyped_storage().data_ptr(), parameters[0].data_ptr()
    for parameter in parameters:
        if parameter.untyped_storage().data_ptr() != storage or parameter.data_ptr() != end:
            return False
        end += parameter.nbytes
    return all(p.is_contiguous() for p in parameters)
