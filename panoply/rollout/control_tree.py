"""Trees of control episodes: edges are some decisions from a state that environments are forked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from panoply.experience import Column, Experience
from panoply.rollout.stepping import BLOCK, Episode, Rows, StepBuffer
from panoply.rollout.tree import Branch, Node, Tree

if TYPE_CHECKING:
    from panoply.rollout.control import ControlCollector
    from panoply.worlds.control.world import Envs, Start


class ControlTree(Tree):
    """What chance does is the same below a node: its edges differ by the policy's own noise alone."""

    collect: ControlCollector

    def __init__(self, collect: ControlCollector, starts: Sequence[Start], temperature: float = 1.0):
        super().__init__(collect, starts, temperature)
        envs = collect.world.envs(len(starts))
        envs.reset(np.arange(len(starts)), np.array([s.seed for s in starts]))
        self._stands: list[tuple[Envs, int, float]] = [(envs, row, 0.0) for row in range(len(starts))]
        """Of each node: environments, the row that stands there, and the rewards that led to it."""
        self._first = collect.state["episodes"]
        self._found: list[Experience] = []

    def _together(self, branch: Branch) -> Any:
        return branch.tokens, id(self._stands[branch.node][0])

    def _continue(self, at: Sequence[Branch]) -> None:
        collect, tokens = self.collect, at[0].tokens
        parents = [b.node for b in at for _ in range(b.times)]
        before = [self.nodes[p] for p in parents]
        number = collect.state["episodes"]
        collect.state["episodes"] += len(parents)
        episodes = [Episode(number + i, node.group, self.tasks[node.task]) for i, node in enumerate(before)]
        envs = self._stands[parents[0]][0].fork(np.array([self._stands[p][1] for p in parents]))
        rows, buffer = Rows(collect, envs), StepBuffer(len(parents), BLOCK)
        rows.go_on(
            episodes, np.array([n.turn for n in before]), np.array([self._stands[p][2] for p in parents])
        )
        while rows.live.any() and (tokens is None or buffer.length < tokens):
            ended = rows.step(buffer, self.temperature)
            if ended is not None:
                rows.live[ended] = False
        found = collect._experience(buffer, rows, self.temperature)
        self._found.append(found)
        each = found.by("episode")
        signals = {n[7:]: each.sum(found[n]).tolist() for n in found.decisions if n.startswith("signal:")}
        entropy = each.mean(found["entropy"]).tolist() if "entropy" in found else [math.nan] * len(parents)
        logp = each.sum(found["logp"].double()).tolist()
        ends, length, earned = each.last(found["end"]), each.count, each.last(found["earned"])
        for i, (parent, node) in enumerate(zip(parents, before, strict=True)):
            own = {name: values[i] for name, values in signals.items()}
            turn = node.turn + int(length[i])
            made = Node(parent, node.task, node.depth + 1, turn, entropy[i], 0, int(ends[i]), own)
            made.decisions, made.logp = int(length[i]), logp[i]
            self.nodes.append(made)
            self._stands.append((envs, i, float(earned[i])))

    def experience(self) -> Experience:
        found, worth = Experience.cat(self._found), self.worth()[len(self.tasks) :]
        edge = found["episode"] - self._first
        last = found.by("episode").is_last()
        parent, depth = self._family(self._first)
        columns: dict[str, Column] = {"parent": parent[edge], "segment": depth[edge]}
        for name in (n[7:] for n in found.decisions if n.startswith("signal:")):
            pairs = zip(self._edges(), worth, strict=True)
            below = torch.tensor([0.0 if w is None else w[name] - (e.earned or {})[name] for e, w in pairs])
            columns[f"signal:{name}"] = found[f"signal:{name}"] + below[edge] * last
        graded = torch.tensor([w is not None for w in worth])[edge]
        found = found.with_columns(**columns)
        return found if bool(graded.all()) else found.take(graded)
