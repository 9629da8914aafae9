"""The running batch: which row sits in which slot, where it is, and the tokens it has so far."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

RUNNING, DEAD = 0, -1
"""Values of `status` besides a turn's reasons to end, which a slot has until the host has seen it."""


@dataclass(frozen=True)
class Slots:
    """One entry a slot, [n]. Never changed in place, so a recorder may keep any column without copying it."""

    row: Tensor
    stream: Tensor
    """The start of the row's random stream."""
    token: Tensor
    """The row's newest token, which is not in the cache yet."""
    position: Tensor
    """Where that token is."""
    start: Tensor
    """Where the turn's first sampled token is."""
    turn: Tensor
    limit: Tensor
    """The length at which the turn ends."""
    status: Tensor

    def __len__(self) -> int:
        return len(self.row)

    @property
    def live(self) -> Tensor:
        return self.status == RUNNING

    def take(self, at: Tensor) -> Slots:
        return Slots(*(getattr(self, field.name)[at] for field in fields(self)))

    def put(self, at: Tensor, rows: Slots) -> Slots:
        """With `rows` at slots `at`, which may lie past the end."""
        size = max(len(self), int(at.max()) + 1)
        columns = []
        for field in fields(self):
            old, new = getattr(self, field.name), getattr(rows, field.name)
            columns.append(torch.cat([old, old.new_full((size - len(old),), DEAD)]).index_copy(0, at, new))
        return Slots(*columns)

    def advance(self, action: Tensor, reason: Tensor) -> Slots:
        """Move live slots on by one token, to `reason` where that ends the turn."""
        live = self.live
        return replace(
            self,
            token=torch.where(live, action, self.token),
            position=self.position + live,
            status=torch.where(live, reason, self.status),
        )

    def marked(self, at: Tensor, status: int) -> Slots:
        return replace(self, status=self.status.index_fill(0, at, status))

    def vacated(self, at: Tensor) -> Slots:
        """Without the rows at `at`. Dead slots go on at the start of a row, within every bound."""
        start, position = self.start.index_fill(0, at, 0), self.position.index_fill(0, at, 0)
        return replace(self.marked(at, DEAD), start=start, position=position)

    @staticmethod
    def empty(device: torch.device) -> Slots:
        return Slots(*(torch.zeros(0, dtype=torch.long, device=device) for _ in fields(Slots)))
