"""Shards: every rank has all weights, and moves some of them. What belongs to a move is only where it is made.

A weight, with its float32 copy and what the optimiser keeps of it, belongs to one rank as a whole: an optimiser that
works by the matrix, with blocks or with its own chance sees what it would in one process, and a checkpoint is the union
of what ranks have, by name. Once a step gradients are summed to whom they belong, moved, and the weights handed around:
2 + 4 bytes a weight and 12 for those a rank owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from panoply.loops.mover import Masters
from panoply.scale.meeting import Meeting

TOGETHER = 1 << 24
"""Numbers that are handed over at a time."""


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Whose each weight is: the largest first, to whoever has least."""
    held, found = [0] * ranks, dict[str, int]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        found[name] = held.index(min(held))
        held[found[name]] += sizes[name]
    return {name: found[name] for name in sizes}


class Shards:
    """What a rank's `masters` lack alone: sums over the group, and weights that others have moved."""

    def __init__(self, masters: Masters, meeting: Meeting):
        self.masters, self.meeting = masters, meeting
        carrying = masters.moving
        self.owner = owners({name: p.numel() for name, p in carrying.items()}, meeting.size)
        masters.leave(name for name, owner in self.owner.items() if owner != meeting.rank)
        self.norm = 0.0
        self._chunks = list(_chunks({name: p.numel() for name, p in carrying.items()}, self.owner))

    @torch.no_grad()
    def sum(self) -> float:
        """Sum every gradient to whom it belongs, and forget the others'; the norm of the whole."""
        if self.meeting.size > 1:
            moving, there = self.masters.moving, self._there()
            for owner, names in self._chunks:
                if names := [name for name in names if there[name]]:
                    slopes = [_slope(moving[name]) for name in names]
                    total = self.meeting.sum_to(owner, torch.cat([s.flatten() for s in slopes]))
                    self._hand_back(names, slopes, total)
        self.norm = self._measured()
        return self.norm

    def _there(self) -> dict[str, bool]:
        """Which weights have a gradient anywhere: one that nobody has is not the same as 0, which moves by momentum."""
        moving = self.masters.moving
        has = torch.tensor([float(p.grad is not None) for p in moving.values()])
        return dict(zip(moving, (self.meeting.sum(has) > 0).tolist(), strict=True))

    def _hand_back(self, names: list[str], slopes: list[Tensor], total: Tensor | None) -> None:
        if total is None:
            for name in names if not self.masters.fixed else ():
                self.masters.moving[name].grad = None
            return
        for name, slope, found in zip(names, slopes, total.split([s.numel() for s in slopes]), strict=True):  # type: ignore[no-untyped-call]
            parameter = self.masters.moving[name]
            if parameter.grad is None:
                parameter.grad = slope
            parameter.grad.copy_(found.view_as(slope))

    def _measured(self) -> float:
        """The norm of the gradient of all weights, as one process has it: that of the norms of each."""
        masters, meeting = self.masters, self.meeting
        if meeting.size == 1:
            return masters.clip(0.0)
        mine = [
            torch.linalg.vector_norm(p.grad)
            if p.grad is not None and name not in masters.elsewhere
            else torch.zeros((), device=p.device)
            for name, p in masters.moving.items()
        ]
        return float(torch.linalg.vector_norm(meeting.sum(torch.stack(mine))))

    @torch.no_grad()
    def clip(self, limit: float) -> None:
        """Shorten the gradients here by what the norm of all of them asks for."""
        if self.meeting.size == 1:
            self.masters.clip(limit)
        elif limit > 0:
            slopes = [p.grad for n, p in self.masters.moving.items() if p.grad is not None]
            factor = min(1.0, limit / (self.norm + 1e-6))
            if slopes and factor < 1:
                torch._foreach_mul_(slopes, factor)

    @contextmanager
    def own_alone(self) -> Iterator[None]:
        """While an optimiser moves: it passes over weights without a gradient."""
        others = {name: self.masters.moving[name] for name in self.masters.elsewhere}
        slopes = {name: parameter.grad for name, parameter in others.items()}
        for parameter in others.values():
            parameter.grad = None
        yield
        for name, parameter in others.items():
            parameter.grad = slopes[name]

    @torch.no_grad()
    def hand_around(self) -> None:
        """After a move: everybody has what its owner has made of a weight."""
        if self.meeting.size == 1:
            return
        weights = {**self.masters.moving, **self.masters.weights}
        for owner, names in self._chunks:
            some = [weights[name].detach() for name in names]
            flat = torch.cat([weight.flatten() for weight in some])
            self.meeting.share(owner, flat)
            if owner != self.meeting.rank:
                for weight, found in zip(some, flat.split([w.numel() for w in some]), strict=True):  # type: ignore[no-untyped-call]
                    weight.copy_(found.view_as(weight))
        for layer in self.masters.adapted:
            layer.merge()

    def first_only(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What all have, and the first tells."""
        return dict(named) if self.meeting.rank == 0 else {}

    def kept(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """What belongs to the weights that are this rank's."""
        return named

    def gradient(self) -> dict[str, Tensor]:
        """Of the weights that are this rank's, by name."""
        named, masters = self.masters.named(), self.masters
        if named is not masters.moving:  # one vector of all
            return {} if masters.elsewhere else {name: _slope(p) for name, p in named.items()}
        return {name: _slope(p) for name, p in named.items() if name not in masters.elsewhere}


def _slope(parameter: Tensor) -> Tensor:
    if parameter.grad is not None:
        return parameter.grad
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def _chunks(sizes: Mapping[str, int], owner: Mapping[str, int]) -> Iterator[tuple[int, list[str]]]:
    """Weights of one owner, as many as are handed over at a time; the same on every rank."""
    for rank in sorted(set(owner.values())):
        names: list[str] = []
        held = 0
        for name, size in sizes.items():
            if owner[name] != rank:
                continue
            if names and held + size > TOGETHER:
                yield rank, names
                names, held = [], 0
            names.append(name)
            held += size
        if names:
            yield rank, names
