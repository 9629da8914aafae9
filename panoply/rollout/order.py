"""The order in which collectors of every kind take a world's tasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from panoply.seeds import stable_hash

T = TypeVar("T")


class InOrder(Generic[T]):
    """Takes tasks one after another; another seed starts elsewhere in the endless list."""

    seed: int
    state: dict[str, Any]
    """What a run saves of a collector; how many tasks were taken is part of it."""

    def task(self, index: int) -> T:
        raise NotImplementedError

    def tasks(self, n: int) -> list[T]:
        """The next `n` tasks."""
        first = self.state["tasks"]
        self.state["tasks"] += n
        return self.numbered(range(first, first + n))

    def numbered(self, numbers: Iterable[int]) -> list[T]:
        """Tasks by their place in the order in which `tasks` gives them."""
        start = stable_hash("tasks", self.seed) >> 16
        return [self.task(start + i) for i in numbers]
