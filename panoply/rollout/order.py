"""What collectors of every kind share: the order in which they take a world's tasks, groups, and who acts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.seeds import stable_hash, torch_rng
from panoply.selves import LEARNER

T = TypeVar("T")


class Selves(Protocol):
    """What a collector asks of a run's snapshots."""

    actors: Sequence[str]
    """Those that parts of the method let act, in the order of their numbers 1, 2, … in the column `actor`."""

    def policy_of(self, name: str) -> Any: ...

    def step_of(self, name: str) -> int:
        """The step whose policy it is."""


class InOrder(Generic[T]):
    """Takes tasks one after another; another seed starts elsewhere in the endless list."""

    seed: int
    state: dict[str, Any]
    """What a run saves of a collector; how many tasks were taken is part of it."""
    models: Mapping[str, Callable[[Sequence[T]], Tensor]] = {}
    """Models beside the policy that say something of tasks before anybody acts on them, by name."""
    dealt: Any = None
    """What a game of several seats has for this one in this step."""
    policy: Any
    version: int
    selves: Selves | None = None
    """Given by the run."""
    actor = 0
    members: Any = None
    """A `Pool` of frozen selves of the policy, where a part needs `members`."""

    def task(self, index: int) -> T:
        raise NotImplementedError

    def tasks(self, n: int) -> list[T]:
        """The next `n` tasks."""
        first = self.state["tasks"]
        self.state["tasks"] += n
        return self.numbered(range(first, first + n))

    def numbered(self, numbers: Iterable[int]) -> list[T]:
        """Tasks by their place in the order in which `tasks` gives them."""
        return [self.task(self.place(i)) for i in numbers]

    def place(self, number: int) -> int:
        """Where in the split the task lies that `tasks` gives after so many others."""
        return (stable_hash("tasks", self.seed) >> 16) + number

    def shuffled(self, n: int, among: int) -> list[int]:
        """The next `n` of so many things: all of them once, then all in another order. They count as tasks taken."""
        first = self.state["tasks"]
        self.state["tasks"] += n
        return in_epochs(self.seed, first, n, among)

    def pool(self, n: int) -> list[T]:
        """The same `n` training tasks in every step, for methods that come back to a task.

        They do not count as tasks taken: `tasks` gives the first `n` of them, too, when it is first asked.
        """
        kept: dict[int, list[T]] = self.__dict__.setdefault("_pools", {})
        if n not in kept:
            kept[n] = self.numbered(range(n))
        return kept[n]

    def _groups(
        self, tasks: Sequence[T], size: int | Sequence[int], into: Tensor | None
    ) -> tuple[list[T], list[int]]:
        """Every task as often as it is asked, and the key of the group each time: a new one, or one of `into`."""
        sizes = [size] * len(tasks) if isinstance(size, int) else list(size)
        if len(sizes) != len(tasks) or min(sizes, default=1) < 1:
            raise PanoplyError(
                f"Each of {len(tasks)} tasks needs a group of at least 1 episode, not {sizes}."
            )
        if into is None:
            first = self.state["groups"]
            self.state["groups"] += len(tasks)
            keys = list(range(first, first + len(tasks)))
        else:
            keys = into.tolist()
        if len(keys) != len(tasks):
            raise PanoplyError(f"{len(tasks)} tasks go into as many groups, not into {len(keys)}.")
        every = [i for i, n in enumerate(sizes) for _ in range(n)]
        return [tasks[i] for i in every], [keys[i] for i in every]

    @contextmanager
    def acted_by(self, who: Any) -> Iterator[None]:
        """Let another act for a while: a snapshot by its name, or any policy of the same form.

        Recorded log-probabilities are then those of who acts. A part that names a snapshot says so in its needs
        (`acts@NAME`); then the column `actor` tells whose a decision is, and `version` of which step.
        """
        if who == LEARNER:
            yield
            return
        before = self.policy, self.version, self.actor
        if isinstance(who, str):
            names = list(self.selves.actors) if self.selves is not None else []
            if self.selves is None or who not in names:
                raise PanoplyError(
                    f"A part lets '{who}' act and does not say so: 'acts@{who}' belongs to its needs."
                )
            self.version, self.actor = self.selves.step_of(who), names.index(who) + 1
            who = self.selves.policy_of(who)
        self.policy = who
        try:
            yield
        finally:
            self.policy, self.version, self.actor = before

    def _acted(self, rows: int) -> dict[str, Tensor]:
        """The column `actor` where more than one may act: 0 is the learner."""
        return {"actor": torch.full((rows,), self.actor)} if self.selves and self.selves.actors else {}


def in_epochs(seed: int, first: int, n: int, among: int) -> list[int]:
    """`n` places of an endless order from `first` on, in which every `among` of them are a new permutation."""
    found: list[int] = []
    while n > 0:
        epoch, at = divmod(first, among)
        order = torch.randperm(among, generator=torch_rng("pairs", seed, epoch))[at : at + n].tolist()
        found, first, n = [*found, *order], first + len(order), n - len(order)
    return found
