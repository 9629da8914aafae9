"""Trees of episodes: segments that branch, each worth what the episodes below it earn on average."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import OPEN, Experience

Worth = dict[str, float] | None
"""What was earned, by signal; none where nothing could be graded."""


class Branch(NamedTuple):
    """An order to a tree: so many continuations of a node."""

    node: int
    times: int
    tokens: int | None = None
    """Decisions of each at most; none means to the end of the turn, or in a control world of the episode."""


@dataclass
class Node:
    """Where an episode stands, and the edge that led there; the first nodes of a tree have none."""

    parent: int
    """The node it branches from, −1 for a task's first."""
    task: int
    """Which of the tree's tasks."""
    depth: int = 0
    turn: int = 0
    """Turns that are over; in a control world, decisions."""
    entropy: float = math.nan
    """The mean over the decisions of the edge."""
    branches: int = 0
    end: int = OPEN
    earned: Worth = None
    """What the edge itself earned; none where it is at its end and could not be graded."""
    group: int = -1
    """The key of the group that the edges from here form."""
    decisions: int = 0
    """How many the edge has."""
    logp: float = 0.0
    """The sum of their log-probabilities."""

    @property
    def ended(self) -> bool:
        return self.end != OPEN


class Tree(ABC):
    """A tree for each task. Every edge becomes an episode, and the edges of a node are a group.

    tree = collect.tree(tasks)
    while branches := grow(tree):
        tree.extend(branches)
    experience = tree.experience()
    """

    def __init__(self, collect: Any, tasks: Sequence[Any], temperature: float):
        self.collect, self.tasks, self.temperature = collect, tasks, temperature
        self.nodes = [Node(-1, i) for i in range(len(tasks))]

    def open(self) -> list[int]:
        """Nodes that nothing branches from yet and that are not at an end."""
        return [i for i, node in enumerate(self.nodes) if not node.ended and not node.branches]

    def children(self, node: int) -> list[int]:
        return [i for i, other in enumerate(self.nodes) if other.parent == node]

    def extend(self, at: Sequence[Branch]) -> None:
        """Let the policy go on from some nodes. New edges are nodes at the end of `nodes`."""
        for branch in at:
            node = self.nodes[branch.node]
            if node.ended or branch.times < 1:
                raise PanoplyError(
                    f"Nothing can branch {branch.times} times from an episode's end or from nowhere."
                )
            if node.group < 0:
                node.group = self.collect.state["groups"]
                self.collect.state["groups"] += 1
        alike: dict[Any, list[Branch]] = {}
        for branch in at:
            alike.setdefault(self._together(branch), []).append(branch)
        for some in alike.values():
            self._continue(some)
            for branch in some:
                self.nodes[branch.node].branches += branch.times

    @abstractmethod
    def _together(self, branch: Branch) -> Any:
        """What branches must have in common to be sampled at once."""

    @abstractmethod
    def _continue(self, at: Sequence[Branch]) -> None: ...

    @abstractmethod
    def experience(self) -> Experience:
        """All edges below which something has ended; each earns what it is worth (`worth`) on its last decision."""

    def worth(self) -> list[Worth]:
        """Of every node: what its edge earned and, on average, the edges below it. None where nothing has ended yet."""
        below: list[list[dict[str, float]]] = [[] for _ in self.nodes]
        found: list[Worth] = [None] * len(self.nodes)
        for i, node in reversed(list(enumerate(self.nodes))):  # children come after their parents
            if node.branches:
                found[i] = _plus(node.earned or {}, below[i]) if below[i] else None
            else:
                found[i] = node.earned if node.ended else None
            worth = found[i]
            if node.parent >= 0 and worth is not None:
                below[node.parent].insert(0, worth)
        return found

    def _edges(self) -> list[Node]:
        return self.nodes[len(self.tasks) :]

    def _family(self, first: int) -> tuple[Tensor, Tensor]:
        """Of each edge: the episode that it branches from (a first one's is negative, by its group), and its depth."""
        edges, roots = self._edges(), len(self.tasks)
        parents = [
            first + e.parent - roots if e.parent >= roots else -1 - self.nodes[e.parent].group for e in edges
        ]
        return torch.tensor(parents), torch.tensor([e.depth - 1 for e in edges])


def _plus(own: dict[str, float], below: Sequence[dict[str, float]]) -> dict[str, float]:
    names = own.keys() | {name for s in below for name in s}
    return {name: own.get(name, 0.0) + sum(s.get(name, 0.0) for s in below) / len(below) for name in names}
