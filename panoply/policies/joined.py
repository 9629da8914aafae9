"""Layers that share their input as one matrix product, without a copy of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


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


class _Product(torch.autograd.Function):
    """One product for layers that share their input: `whole` is a tensor over all their weights, which follow."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, whole: Tensor, bias: Tensor | None, biases: int, *parts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, whole)
        ctx.lengths, ctx.biases = [len(p) for p in parts[biases:]], biases
        return torch.nn.functional.linear(x, whole, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        x, whole = ctx.saved_tensors
        on_biases = torch.split(g.sum(0), ctx.lengths) if ctx.biases else ()
        on_weights = torch.split(g.t() @ x, ctx.lengths)
        return g @ whole, None, None, None, *on_biases, *on_weights


def product(
    x: Tensor, whole: Tensor, bias: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """x · wholeᵀ + bias, where `whole` and `bias` lie over `weights` and `biases`, which get the gradients."""
    found: Tensor = _Product.apply(x, whole, bias, len(biases), *biases, *weights)  # type: ignore[no-untyped-call]
    return found
