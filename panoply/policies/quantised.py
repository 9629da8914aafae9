"""Frozen weights in 4 or 8 bits, with a scale for every 64 of them, given back whole when asked for.

`nf4` has 16 levels between which normal numbers lie equally often, with 0 among them (Dettmers et al. 2023); `int8` has
255 at equal distances. Both are rounded to the nearest, so the same weights give the same bytes in every run.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panoply.lora import BLOCK
from panoply.policies.scoring import has_triton

Kind = Literal["nf4", "int8"]
TAIL = 0.9677083
"""The outermost level lies where a normal number is below with this probability; all are then divided by it."""


@cache
def levels() -> Tensor:
    """The 16 numbers of `nf4`, from −1 to 1: seven below 0, and eight above."""
    above, below = (torch.linspace(TAIL, 0.5, n, dtype=torch.float64)[:-1] for n in (9, 8))
    found = torch.cat([-torch.special.ndtri(below), torch.zeros(1), torch.special.ndtri(above)])
    return (found / found.max()).sort().values.float()


@cache
def _levels_on(device: torch.device) -> Tensor:
    """At one address, where a captured graph finds them."""
    return levels().to(device)


class Quantised:
    """A tensor in few bits."""

    def __init__(self, whole: Tensor, kind: Kind):
        self.shape, self.dtype, self.kind = whole.shape, whole.dtype, kind
        flat = whole.detach().float().flatten()
        blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        self.scales = blocks.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        shares = blocks / self.scales
        if kind == "int8":
            self.codes = (127 * shares).round().to(torch.int8)
        else:
            there = levels().to(whole.device)
            number = torch.bucketize(shares, (there[1:] + there[:-1]) / 2).to(torch.uint8)
            self.codes = number[:, ::2] * 16 + number[:, 1::2]

    def whole(self) -> Tensor:
        """The tensor again, as near as its levels are."""
        if self.codes.is_cuda and len(self.shape) == 2 and has_triton():
            found = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
            self.write(found)
            return found
        if self.kind == "int8":
            shares = self.codes.float() / 127
        else:
            number = torch.stack([self.codes >> 4, self.codes & 15], dim=-1).flatten(1)
            shares = levels().to(self.codes.device)[number.int()]
        return (shares * self.scales).flatten()[: self.shape.numel()].view(self.shape).to(self.dtype)

    def write(
        self, out: Tensor, a: Tensor | None = None, b: Tensor | None = None, scale: float = 0.0
    ) -> None:
        """The matrix, and s·B·A added to it in float32 or more, rounded once into `out`."""
        if self.codes.is_cuda and has_triton():
            from panoply.kernels.quantised import restore

            there = None if self.kind == "int8" else _levels_on(self.codes.device)
            restore(self.codes, self.scales, there, BLOCK, out, a, b, scale)
            return
        out.copy_(self.whole() if a is None or b is None else (b @ a).mul_(scale).add_(self.whole()))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


class QuantisedLinear(nn.Module):
    """A linear layer that never learns; its weight is made whole for every product."""

    def __init__(self, layer: nn.Linear, kind: Kind):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self.held = Quantised(layer.weight, kind)

    @property
    def weight(self) -> Tensor:
        return self.held.whole()

    def write(self, out: Tensor) -> None:
        self.held.write(out)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
