"""Low-rank factors of a layer: their gradients without ∂W, and their own product where W₀ is in few bits.

Of W = W₀ + s·B·A the gradients of A and B come from the layer's input and slope. Merged weights are one plain matrix;
one in few bits cannot take anything in, and (x · Aᵀ) · (s·B)ᵀ is added to its product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from panoply.policies.scoring import wide_product


@dataclass(frozen=True)
class Stack:
    """The factors of layers that share their input, times s and in their weights' dtype, as products want them."""

    a: Tensor
    """[ranks of all, inputs]: every A, one below the other."""
    bare: Tensor | None
    """The same without s, which a product of both would have twice; None where there is none, because W has it."""
    b: Tensor
    """[outputs of all, ranks of all]: every B along a diagonal, and zeros elsewhere."""
    spans: tuple[tuple[slice, slice], ...]
    """Of each layer that has factors: its outputs, and its ranks."""
    leaves: tuple[Tensor, ...]
    """A and B of each of them, which get the gradients."""


class Few(Protocol):
    """A matrix that few bits stand for, with the factors beside it."""

    @property
    def stack(self) -> Stack | None: ...

    def whole(self) -> Tensor:
        """The matrix without its factors, made for a product and not kept for the backward pass."""

    def product(self, x: Tensor, bias: Tensor | None, parts: bool = False) -> Tensor:
        """x · (W₀ + s·B·A)ᵀ + bias, without gradients."""


Weight = Tensor | Few


def matrix(weight: Weight) -> Tensor:
    """A weight that is whole, without its factors where they are not merged into it."""
    return weight if isinstance(weight, Tensor) else weight.whole()


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x · Wᵀ + bias, the factors' part included, without gradients."""
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight.product(x, bias)


def beside(weight: Weight) -> Stack | None:
    """The factors whose product is to be added to a weight's."""
    return None if isinstance(weight, Tensor) else weight.stack


def onto(y: Tensor, x: Tensor, stack: Stack | None) -> Tensor:
    """[N, outputs] `y` with (x · Aᵀ) · (s·B)ᵀ added to it, in place."""
    if stack is None:
        return y
    assert stack.bare is not None
    return y.addmm_(x @ stack.bare.t(), stack.b.t())


def back_onto(on_x: Tensor, v: Tensor, stack: Stack | None) -> Tensor:
    """[N, inputs] `on_x`, the slope by the input, with what comes through the factors added to it, in place.

    v   [N, ranks of all], the slope by the output times s·B
    """
    if stack is None:
        return on_x
    assert stack.bare is not None
    return on_x.addmm_(v, stack.bare)


def slopes(x: Tensor, g: Tensor, v: Tensor, stack: Stack) -> list[Tensor]:
    """∂A and ∂B of every layer of a stack. With u = s·xAᵀ and v = s·gB they are ∂A = vᵀx and ∂B = gᵀu.

    There are four products however many layers share their input: on a GPU they are short, and calls would cost more.

    x   [N, inputs], what the layers were given
    g   [N, outputs of all], the slope by what they put out
    v   [N, ranks of all], that times s·B
    """
    on_a = wide_product(v.t(), x)
    on_b = wide_product(g.t(), x @ stack.a.t())
    return [slope for outputs, ranks in stack.spans for slope in (on_a[ranks], on_b[outputs, ranks])]
