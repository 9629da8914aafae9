"""Frozen weights in 4 or 8 bits, with a scale for every 64 of them, given back whole when asked for.

`nf4` has 16 levels between which normal numbers lie equally often, with 0 among them (Dettmers et al. 2023); `int8` has
255 at equal distances. Both are rounded to the nearest, so the same weights give the same bytes in every run.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from panoply.kernels.low_rank import Stack, onto
from panoply.lora import BLOCK, PAIR
from panoply.policies.adjoining import adjoin
from panoply.policies.scoring import has_triton

if TYPE_CHECKING:
    from panoply.kernels.quantised import Codes

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
    """A tensor in few bits. A byte of `nf4` holds a number of one block and, in its lower half, one of the next."""

    joint: tuple[tuple[Quantised, ...], Quantised] | None = None
    """Those that it was joined with, itself the first of them, and what lies over all."""

    def __init__(self, whole: Tensor, kind: Kind):
        self.shape, self.dtype, self.kind = whole.shape, whole.dtype, kind
        flat = whole.detach().float().flatten()
        blocks = F.pad(flat, (0, -len(flat) % PAIR)).view(-1, BLOCK)
        most = blocks.abs().amax(1, keepdim=True) / (127 if kind == "int8" else 1)
        self.scales = most.clamp(min=torch.finfo(torch.float32).tiny)
        shares = blocks / self.scales
        if kind == "int8":
            self.codes = shares.round().to(torch.int8)
        else:
            there = levels().to(whole.device)
            number = torch.bucketize(shares, (there[1:] + there[:-1]) / 2).to(torch.uint8)
            self.codes = number[::2] * 16 + number[1::2]

    def whole(self) -> Tensor:
        """The tensor again, as near as its levels are."""
        found = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        self.write(found)
        return found

    def write(self, out: Tensor) -> None:
        """The tensor again into another, whose numbers lie one after another."""
        if self.codes.is_cuda and has_triton():
            from panoply.kernels.quantised import restore

            restore(self.held, out)
        elif self.kind == "int8":
            self._write(out, self.codes.float())
        else:
            number = torch.stack([self.codes >> 4, self.codes & 15], dim=1).view(-1, BLOCK)
            self._write(out, levels().to(self.codes.device)[number.int()])

    def _write(self, out: Tensor, shares: Tensor) -> None:
        out.copy_((shares * self.scales).flatten()[: self.shape.numel()].view(self.shape))

    @property
    def held(self) -> Codes:
        """As kernels want it."""
        from panoply.kernels.quantised import Codes

        return Codes(self.codes, self.scales, None if self.kind == "int8" else _levels_on(self.codes.device))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def join(parts: Sequence[Quantised]) -> Quantised | None:
    """Matrices of one width as one that lies over them, of which they become views.

    None where their rows do not begin with a pair of blocks.
    """
    first = parts[0]
    if first.joint is not None and first.joint[0] == tuple(parts):
        return first.joint[1]
    if first.shape[1] % PAIR or any(
        part.shape[1] != first.shape[1] or part.kind != first.kind for part in parts
    ):
        return None
    if len(parts) == 1:
        return first
    whole = copy.copy(first)
    whole.shape = torch.Size((sum(part.shape[0] for part in parts), first.shape[1]))
    whole.codes = adjoin([part.codes for part in parts])
    whole.scales = adjoin([part.scales for part in parts])
    first.joint = tuple(parts), whole
    return whole


class FewBits:
    """The weights of layers that share their input, some of them in few bits, one below the other: a `Few`."""

    def __init__(self, parts: Sequence[Quantised | Tensor], stack: Stack | None):
        self.parts, self.stack = parts, stack
        self.outputs = [part.shape[0] for part in parts]

    @cached_property
    def joined(self) -> Quantised | None:
        few = [part for part in self.parts if isinstance(part, Quantised)]
        return join(few) if len(few) == len(self.parts) else None

    def whole(self) -> Tensor:
        if self.joined is not None:
            return self.joined.whole()
        like = next(part for part in self.parts if isinstance(part, Quantised))
        found = torch.empty(sum(self.outputs), like.shape[1], dtype=like.dtype, device=like.codes.device)
        for part, room in zip(self.parts, torch.split(found, self.outputs), strict=True):
            if isinstance(part, Quantised):
                part.write(room)
            else:
                room.copy_(part.detach())
        return found

    @torch.no_grad()
    def product(self, x: Tensor, bias: Tensor | None, parts: bool = False) -> Tensor:
        """x · (W₀ + s·B·A)ᵀ + bias of [rows, inputs]. Few rows are multiplied with the codes as they lie.

        parts   whether it may be in some that are to be summed
        """
        if (few := self._as_it_lies(x)) is not None:
            from panoply.kernels.quantised import cuts_of, few_product

            cut = cuts_of(len(x), *few.shape) if parts and bias is None else 1
            return few_product(x, few.held, self.stack, bias, cut)
        return onto(F.linear(x, self.whole(), bias), x, self.stack)

    def _as_it_lies(self, x: Tensor) -> Quantised | None:
        """The codes, if the rows of `x` are few enough to be multiplied with them."""
        if not (x.is_cuda and has_triton()):
            return None
        from panoply.kernels.quantised import ROWS

        return self.joined if len(x) <= ROWS else None


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

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
