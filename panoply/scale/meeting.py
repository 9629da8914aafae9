"""Where the ranks of a group of learners meet: to sum numbers in the order of their ranks, and to hand them around.

On threads they meet in memory, elsewhere by torch.distributed: gloo on CPUs, NCCL on GPUs. On CPUs every sum is formed
in the order of the ranks, by whoever asks for it, so that threads and processes come to the same bits.
"""

from __future__ import annotations

import datetime
import socket
import threading
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

MEMORY = "memory:"
"""Addresses that begin so are of this process."""


class Meeting(Protocol):
    """Every rank must ask for the same things in the same order."""

    rank: int
    size: int

    def sum_to(self, owner: int, part: Tensor) -> Tensor | None:
        """Of all ranks' parts, to the owner alone; the others get nothing."""

    def share(self, owner: int, whole: Tensor) -> None:
        """What the owner has, written into everybody's tensor of the same size."""

    def sum(self, part: Tensor) -> Tensor:
        """Of all ranks' parts, to everybody; for a few numbers."""

    def close(self) -> None: ...


def meet(rank: int, size: int, address: str, device: torch.device | None = None) -> Meeting:
    """Join the others; returns when all are there."""
    if size == 1:
        return Alone()
    if address.startswith(MEMORY):
        return InMemory(rank, size, address)
    return Distributed(rank, size, address, device or torch.device("cpu"))


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def sum_to(self, owner: int, part: Tensor) -> Tensor | None:
        return part

    def share(self, owner: int, whole: Tensor) -> None:
        pass

    def sum(self, part: Tensor) -> Tensor:
        return part

    def close(self) -> None:
        pass


class Table:
    """Where threads lay what they bring."""

    def __init__(self, size: int):
        self.barrier, self.parts = threading.Barrier(size), [None] * size


_TABLES: dict[str, Any] = {}
_LOCK = threading.Lock()


def leave(address: str) -> None:
    """Whoever still waits in memory for one that will not come waits no longer."""
    with _LOCK:
        table = _TABLES.pop(address, None)
    if table is not None:
        table.barrier.abort()


class InMemory:
    def __init__(self, rank: int, size: int, address: str):
        self.rank, self.size, self.address = rank, size, address
        with _LOCK:
            self.table: Any = _TABLES.setdefault(address, Table(size))

    def _laid(self, part: Tensor) -> list[Tensor]:
        """Everybody's parts; they may be changed again once `_done` was called."""
        self.table.parts[self.rank] = part
        self.table.barrier.wait()
        return list(self.table.parts)

    def _done(self) -> None:
        self.table.barrier.wait()

    def sum_to(self, owner: int, part: Tensor) -> Tensor | None:
        parts = self._laid(part)
        total = _in_order(parts) if self.rank == owner else None
        self._done()
        return total

    def share(self, owner: int, whole: Tensor) -> None:
        theirs = self._laid(whole)[owner]
        if self.rank != owner:
            whole.copy_(theirs)
        self._done()

    def sum(self, part: Tensor) -> Tensor:
        total = _in_order(self._laid(part))
        self._done()
        return total

    def close(self) -> None:
        leave(self.address)


def _in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class Distributed:
    """`address` is host:port of the first rank, which opens it."""

    def __init__(self, rank: int, size: int, address: str, device: torch.device):
        self.rank, self.size, self.device = rank, size, device
        self.nccl = device.type == "cuda"
        host, _, port = address.rpartition(":")
        wait = datetime.timedelta(minutes=30)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), size, rank == 0, timeout=datetime.timedelta(minutes=5)
        )
        dist.init_process_group(
            "nccl" if self.nccl else "gloo", store=store, rank=rank, world_size=size, timeout=wait
        )

    def sum_to(self, owner: int, part: Tensor) -> Tensor | None:
        if self.nccl:
            dist.reduce(part, owner)
            return part if self.rank == owner else None
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == owner else None
        dist.gather(part, parts, owner)
        return None if parts is None else _in_order(parts)

    def share(self, owner: int, whole: Tensor) -> None:
        dist.broadcast(whole, owner)

    def sum(self, part: Tensor) -> Tensor:
        beside = part.to(self.device)
        parts = [torch.empty_like(beside) for _ in range(self.size)]
        dist.all_gather(parts, beside)
        return _in_order(parts).to(part.device)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def free_address() -> str:
    """A host and port of this machine at which others can meet."""
    name = socket.gethostbyname(socket.gethostname())
    with socket.socket() as found:
        found.bind(("", 0))
        return f"{name}:{found.getsockname()[1]}"
