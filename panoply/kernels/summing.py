"""Gradients of weights in half precision that add up in float32 where they are made, over all passes of a step.

Left to autograd, a pass would leave each rounded to the weight's own bits, and something would have to add them up
afterwards: one more trip through memory, and one more call for each of hundreds of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Sum:
    """A weight's gradient so far; None before the first pass."""

    def __init__(self, weight: Tensor):
        self.rows, self.total = len(weight), None

    total: Tensor | None
    joint: Tensor | None = None
    """That of weights one below the other, of which this is the first: what lies under all their totals."""

    def clear(self) -> None:
        self.total = self.joint = None

    def add(self, slope: Tensor) -> None:
        """A gradient in float32, which may be kept."""
        if self.total is None:
            self.total = slope
        else:
            self.total += slope


def sum_product(sums: Sequence[Sum], a: Tensor, b: Tensor) -> None:
    """Add a · b, [rows of all, columns], to the gradients of weights that lie one below the other."""
    from panoply.policies.scoring import add_product, wide_product

    if (joint := sums[0].joint) is not None:
        add_product(joint, a, b)
    else:
        sum_parts(sums, wide_product(a, b))


def sum_parts(sums: Sequence[Sum], slope: Tensor) -> None:
    """Add a gradient in float32, which may be kept, of weights that lie one below the other."""
    if (joint := sums[0].joint) is not None:
        joint += slope
        return
    if all(each.total is None for each in sums):
        sums[0].joint = slope
    for each, part in zip(sums, torch.split(slope, [each.rows for each in sums]), strict=True):
        each.add(part)


noted: Mapping[int, Sum] = {}
"""By the weights' ids, while they are summed: all that forward passes are to note."""


@contextmanager
def summing(sums: Mapping[Tensor, Sum]) -> Iterator[None]:
    """Inside, forward passes note where the gradients of these weights belong, and autograd is given none of them."""
    global noted
    before, noted = noted, {id(weight): each for weight, each in sums.items()}
    try:
        yield
    finally:
        noted = before


def sums_of(weights: Sequence[Tensor]) -> list[Sum] | None:
    """Where the gradients of all of these add up; None where autograd is to have them."""
    found = [each for weight in weights if (each := noted.get(id(weight))) is not None]
    return found if len(found) == len(weights) else None
