"""Trees of answers: segments that branch, each worth what the answers below it earn on average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from panoply.errors import Resumable
from panoply.experience import OPEN, OWN, TERMINATED, TRUNCATED, Column, Experience, Segments, Table
from panoply.rollout.engine import Request
from panoply.seeds import stable_hash
from panoply.worlds.world import earned

if TYPE_CHECKING:
    from panoply.rollout.rollouts import Rollouts
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task


@dataclass
class _Edge:
    """A segment that follows a node; the node it leads to is a leaf, or has edges of its own."""

    task: Task
    answer: list[int]
    """All tokens after the prompt, those of earlier segments included."""
    ended: bool
    children: list[_Edge] = field(default_factory=list)
    signals: dict[str, float] | None = None
    """What a leaf earned, or the mean of the children's; none where nothing below could be graded."""

    def back_up(self) -> dict[str, float] | None:
        """V(leaf) = its grade, V(node) = the mean of its children's."""
        if self.children:
            graded = [s for child in self.children if (s := child.back_up()) is not None]
            names = {name for s in graded for name in s}
            means = {name: sum(s.get(name, 0.0) for s in graded) / len(graded) for name in names}
            self.signals = means if graded else None
        return self.signals


def grow(
    collect: Collector,
    tasks: Sequence[Task],
    branching: Sequence[int],
    segment: int,
    temperature: float = 1.0,
) -> Experience:
    """A tree of the policy's own answers to each task; every edge is an episode and every node's edges a group.

    A level draws `branching[level]` continuations of `segment` tokens of every node that has not ended, the last level
    to the answer's end. Edges with one prefix share it, and learn only what they add. For worlds of one turn.
    """
    nodes: list[tuple[Task, list[int]]] = [(task, []) for task in tasks]
    tables: list[tuple[Table, Table]] = []
    roots: list[_Edge] = []
    every: list[_Edge] = []
    parents: list[_Edge] = []
    first_group, first_row = collect.state["groups"], 0
    for level, width in enumerate(branching):
        last = level == len(branching) - 1
        room = collect.world.max_tokens - level * segment
        rollouts = _continue(collect, nodes, width, temperature, room if last else min(segment, room))
        edges = _edges(nodes, rollouts, last or room <= segment)
        for number, edge in enumerate(edges):
            (parents[number // width].children if level else roots).append(edge)
        group = first_group + rollouts.request
        tables.append(_shifted(rollouts, group, first_row))
        first_group, first_row = first_group + len(nodes), first_row + len(edges)
        every += edges
        parents = [edge for edge in edges if not edge.ended]
        nodes = [(edge.task, edge.answer) for edge in parents]
        if not nodes:
            break
    collect.state["groups"] = first_group
    _grade(collect, [edge for edge in every if not edge.children])
    for root in roots:
        root.back_up()
    return _experience(collect, every, tables)


def _continue(
    collect: Collector, nodes: Sequence[tuple[Task, list[int]]], width: int, temperature: float, longest: int
) -> Rollouts:
    first = int(collect._number(len(nodes) * width)[0])
    requests = [
        Request((*task.prompt, *prefix), [collect._draw(first + i * width + k) for k in range(width)])
        for i, (task, prefix) in enumerate(nodes)
    ]
    sampling = collect._sampling(temperature, max_tokens=longest)
    return collect.engine.generate(requests, sampling, entropy=True)


def _edges(nodes: Sequence[tuple[Task, list[int]]], rollouts: Rollouts, last: bool) -> list[_Edge]:
    rows = zip(rollouts.request.tolist(), rollouts.completions(), rollouts.end.tolist(), strict=True)
    return [
        _Edge(nodes[node][0], [*nodes[node][1], *told], last or end == TERMINATED) for node, told, end in rows
    ]


def _shifted(rollouts: Rollouts, group: Tensor, first: int) -> tuple[Table, Table]:
    """A level's tables with numbers of their own: rows of the context after earlier levels', prompts by group."""
    row = rollouts.decisions.tensor("context")
    moved: dict[str, Column] = {"context": row + first, "group": group[row]}
    return rollouts.decisions.plus(moved), rollouts.context.plus({"prompt": group})


def _grade(collect: Collector, leaves: Sequence[_Edge]) -> None:
    graded = collect.world.grade_all([leaf.task for leaf in leaves], [leaf.answer for leaf in leaves])
    for leaf, signals in zip(leaves, graded, strict=True):
        leaf.signals = None if signals is None else {name: earned(x) for name, x in signals.items()}
    if all(signals is None for signals in graded):
        why = "; ".join(collect.world.failures())
        raise Resumable(f"Not one of {len(leaves)} answers could be graded: {why}.")


def _experience(
    collect: Collector, edges: Sequence[_Edge], tables: Sequence[tuple[Table, Table]]
) -> Experience:
    decisions, context = (Table.cat(list(several)) for several in zip(*tables, strict=True))
    collect._count(decisions)
    row = decisions.tensor("context")
    is_last = Segments(row).is_last()
    first = collect.state["episodes"] - len(edges)
    cut = decisions.tensor("end") == TRUNCATED
    inner = torch.tensor([bool(edge.children) for edge in edges])[row]
    end = torch.where(cut, TRUNCATED, TERMINATED).masked_fill(inner | ~is_last, OPEN)
    shared = context.tensor("shared").tolist()
    starts = [
        stable_hash(e.task.id, *e.answer[: n - len(e.task.prompt)])
        for e, n in zip(edges, shared, strict=True)
    ]
    columns: dict[str, Column] = {
        "task": torch.tensor([edge.task.id for edge in edges])[row],
        "episode": first + row,
        "state": torch.tensor(starts)[row],
        "version": torch.full_like(row, collect.version),
        "source": torch.full_like(row, OWN),
        "end": end,
    }
    for name in sorted({name for edge in edges for name in edge.signals or ()}):
        worth = torch.tensor([(edge.signals or {}).get(name, 0.0) for edge in edges])
        columns[f"signal:{name}"] = worth[row] * is_last
    experience = Experience(decisions.plus(columns), context)
    graded = torch.tensor([edge.signals is not None for edge in edges])[row]
    return experience if bool(graded.all()) else experience.take(graded)
