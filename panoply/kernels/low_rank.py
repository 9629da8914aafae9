"""Gradients of low-rank factors: of W = W₀ + s·B·A those of A and B, from a layer's input and slope, without ∂W."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from panoply.policies.scoring import wide_product

Weight = Tensor | Callable[[], Tensor]
"""A matrix, or what makes it: one that few bits stand for is made for a product, and not kept for the backward pass."""


def matrix(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight()


@dataclass(frozen=True)
class Stack:
    """The factors of layers that share their input, times s and in their weights' dtype, as products want them."""

    a: Tensor
    """[ranks of all, inputs]: every A, one below the other."""
    b: Tensor
    """[outputs of all, ranks of all]: every B along a diagonal, and zeros elsewhere."""
    spans: tuple[tuple[slice, slice], ...]
    """Of each layer that has factors: its outputs, and its ranks."""
    leaves: tuple[Tensor, ...]
    """A and B of each of them, which get the gradients."""


def slopes(x: Tensor, g: Tensor, stack: Stack) -> list[Tensor]:
    """∂A and ∂B of every layer of a stack. With u = xAᵀ and v = gB they are ∂A = s·vᵀx and ∂B = s·gᵀu.

    There are four products however many layers share their input: on a GPU they are short, and calls would cost more.

    x   [N, inputs], what the layers were given
    g   [N, outputs of all], the slope by what they put out
    """
    on_a = wide_product((g @ stack.b).t(), x)
    on_b = wide_product(g.t(), x @ stack.a.t())
    return [slope for outputs, ranks in stack.spans for slope in (on_a[ranks], on_b[outputs, ranks])]
