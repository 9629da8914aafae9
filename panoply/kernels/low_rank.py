"""Gradients of low-rank factors: of W = W₀ + s·B·A those of A and B, from a layer's input and slope, without ∂W."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from panoply.policies.scoring import wide_product


class Factors(NamedTuple):
    """What a layer of weight [outputs, inputs] learns: B·A, times s. A layer that learns nothing has rank 0."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[outputs, rank]"""
    scale: float


def slopes(x: Tensor, g: Tensor, factors: Sequence[Factors]) -> list[Tensor]:
    """∂A and ∂B of each of some layers that share their input, in the factors' own dtype.

    With u = xAᵀ and v = gB they are ∂A = s·vᵀx and ∂B = s·gᵀu. The layers' slopes lie side by side in `g`; with all A
    stacked and all B along a diagonal, there are four products however many layers there are.

    x   [N, inputs], what the layers were given
    g   [N, outputs of all], the slope by what they put out
    """
    a = torch.cat([f.a for f in factors]).to(x.dtype)
    b = torch.block_diag(*(f.b * f.scale for f in factors)).to(g.dtype)  # type: ignore[no-untyped-call]
    on_a = wide_product((g @ b).t(), x)
    on_b = wide_product(g.t(), x @ a.t())
    found, row, rank = [], 0, 0
    for f in factors:
        outputs, own = f.b.shape
        found += [
            on_a[rank : rank + own].to(f.a.dtype),
            (on_b[row : row + outputs, rank : rank + own] * f.scale).to(f.b.dtype),
        ]
        row, rank = row + outputs, rank + own
    return found
