"""A tree of answers to one task that is searched: which node is expanded next, and what its values come to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from panoply.rollout.tree import Tree

Bonus = Literal["sqrt", "log", "linear"]
After = Literal["frontier", "root"]


def backed_up(value: float, outcome: float, gamma: float) -> float:
    """A node's value after an answer below it ended with 1 or −1, which counts γ there.

    A failure never lowers a node that a success has passed, and a success wipes out earlier failures.
    """
    if value * outcome >= 0:
        return value + gamma * outcome
    return gamma * outcome if outcome > 0 else value


class Search:
    """What is known of one task's tree: sums of outcomes, visits, and which node is expanded next."""

    def __init__(
        self,
        tree: Tree,
        root: int,
        group: int,
        deepest: int,
        explore: float,
        weights: tuple[float, float, float],
        bonus: Bonus,
        floor: float,
        after: After,
    ):
        self.tree, self.root, self.group, self.deepest = tree, root, group, deepest
        self.explore, self.weights, self.bonus, self.floor, self.after = explore, weights, bonus, floor, after
        self.at: int | None = root
        """The node to be expanded next; none when there are enough answers, or nothing is left."""
        self.value: dict[int, float] = {root: 0.0}
        self.visits: dict[int, int] = {root: 0}
        self.children: dict[int, list[int]] = {}
        self.kept: list[int] = []
        """Ends that are learned from, in the order they were found."""
        self.others: list[int] = []
        """Further ends, which were found beside those."""

    def outcome(self, node: int) -> float:
        return 1.0 if (self.tree.nodes[node].earned or {}).get("success", 0.0) > 0 else -1.0

    def expanded(self, new: Sequence[int]) -> None:
        """Take note of the children of the node that was expanded, and choose the next."""
        assert self.at is not None
        nodes = self.tree.nodes
        self.children[self.at] = list(new)
        for child in new:
            self.value[child], self.visits[child] = 0.0, 0 if nodes[child].ended else 1
        ended = [child for child in new if nodes[child].ended and nodes[child].earned is not None]
        if ended:
            best = min(ended, key=self._preference)
            self.others += [child for child in ended if child != best]
            self._keep(best)
        if len(self.kept) >= self.group:
            self.at = None
        elif ended or not any(not nodes[child].ended for child in new):
            self.at = self._from_root() if self.after == "root" else self._frontier()
        else:
            self.at = max((c for c in new if not nodes[c].ended), key=self.puct)
        if self.at is None:
            self._fill()

    def _preference(self, end: int) -> tuple[float, float]:
        """Right ones first, then those that were said with most confidence."""
        return -self.outcome(end), self.surprise(self._path(end)[1:])

    def _keep(self, end: int) -> None:
        self.kept.append(end)
        outcome, path = self.outcome(end), self._path(end)
        for node in path:
            gamma = max((self.tree.nodes[node].depth + 1) / len(path), self.floor)
            self.value[node] = backed_up(self.value[node], outcome, gamma)
            self.visits[node] += 1

    def _fill(self) -> None:
        """Where the whole tree is searched and answers are lacking: ends that were found beside others."""
        while len(self.kept) < self.group and self.others:
            best = min(self.others, key=self._preference)
            self.others.remove(best)
            self._keep(best)

    # -------------------------------------------------------------- which node is next

    def mean(self, node: int) -> float:
        """Q = v/N."""
        return self.value[node] / self.visits[node] if self.visits[node] else 0.0

    def puct(self, node: int) -> float:
        parent = self.visits[self.tree.nodes[node].parent]
        seen = self.visits[node]
        return self.mean(node) + (
            self.explore * math.sqrt(math.log(parent) / seen) if parent and seen else 0.0
        )

    def priority(self, node: int) -> float:
        """F = λ₁·tanh Q(parent) + λ₂·(−mean log-probability of its own tokens) + λ₃·depth."""
        quality, doubt, deep = self.weights
        depth = self.tree.nodes[node].depth
        far = {"sqrt": math.sqrt(depth / self.deepest), "log": math.log(depth + 1), "linear": float(depth)}
        known = math.tanh(self.mean(self.tree.nodes[node].parent))
        return quality * known + doubt * self.surprise([node]) + deep * far[self.bonus]

    def _frontier(self) -> int | None:
        """Of all nodes that may be expanded the one that promises most, wherever it is."""
        nodes = self.tree.nodes
        free = [n for n in self.value if n != self.root and n not in self.children and not nodes[n].ended]
        return max(free, key=self.priority) if free else None

    def _from_root(self) -> int | None:
        """From the start down, at each node to the best child under which something is left to be expanded."""
        at = self.root
        while at in self.children:
            alive = [child for child in self.children[at] if self._alive(child)]
            if not alive:
                return None
            at = max(alive, key=self.puct)
        return at

    def _alive(self, node: int) -> bool:
        if self.tree.nodes[node].ended:
            return False
        return node not in self.children or any(self._alive(child) for child in self.children[node])

    def _path(self, node: int) -> list[int]:
        """From the root to a node."""
        path = [node]
        while path[-1] != self.root:
            path.append(self.tree.nodes[path[-1]].parent)
        return path[::-1]

    def surprise(self, edges: Sequence[int]) -> float:
        """−mean log-probability of what was said on some edges."""
        nodes = [self.tree.nodes[edge] for edge in edges]
        return -sum(n.logp for n in nodes) / max(1, sum(n.decisions for n in nodes))
