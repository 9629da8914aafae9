"""Where trees of episodes branch: what to add to a tree as it stands, or nothing when it is grown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from panoply.costs import Lengths, Tokens
from panoply.parts import Finding, part
from panoply.rollout.tree import Branch, Tree


def _segments(held: Any, method: Any, world: Any) -> Iterable[Finding]:
    if held.segment and getattr(world, "turn_cap", 0) > 1:
        yield "segment", f"a turn of {world.name} cannot be cut; 0 branches after whole turns"


def _levels(held: Any, method: Any, world: Any) -> Iterable[Finding]:
    if not held.branching:
        yield "branching", "every level needs at least one branch"
    elif max(held.branching) == 1:
        yield "branching", "without siblings there is nothing to compare"
    yield from _segments(held, method, world)


def _levels_cost(held: Any, of: Lengths) -> Tokens:
    """Of one tree, should no branch end before its answer does."""
    depth, segment = len(held.branching), held.segment or of.answer
    nodes = [math.prod(held.branching[:level]) for level in range(depth + 1)]
    lengths = [min(segment, max(0, of.answer - level * segment)) for level in range(depth)]
    lengths[-1] = max(0, of.answer - (depth - 1) * segment)
    sampled = sum(n * length for n, length in zip(nodes[1:], lengths, strict=True))
    prefixes = sum(n * min(level * segment, of.answer) for level, n in enumerate(nodes[:-1]))
    return sampled, sampled + sum(nodes[:-1]) * of.prompt + prefixes


@part(
    "grow",
    equation="branch {branching} times, every {segment} tokens",
    bounds={"branching": "from 1 to 1000", "segment": "at least 0"},
    impossible=_levels,
    cost=_levels_cost,
)
def levels(tree: Tree, *, branching: tuple[int, ...] = (6, 6, 6), segment: int = 600) -> list[Branch]:
    """Every open node branches as often as its level says, and the last level goes on to the end (SPO-tree).

    branching   how many edges leave a node, level by level
    segment     tokens of an edge, in a control world decisions; 0: a whole turn
    """
    found = []
    for i in tree.open():
        depth = tree.nodes[i].depth
        times = branching[depth] if depth < len(branching) else 1
        found.append(Branch(i, times, segment or None if depth < len(branching) - 1 else None))
    return found


def _frontier_cost(held: Any, of: Lengths) -> Tokens:
    """Of one tree, at most: everything that is expanded, and a whole answer from every leaf."""
    leaves = 1 + held.expansions * (held.branches - 1)
    segment = min(held.segment or of.answer, of.answer)
    sampled = held.expansions * held.branches * segment + leaves * of.answer
    return sampled, sampled + (held.expansions + leaves) * (of.prompt + of.answer)


@part(
    "grow",
    equation="{expansions} times {branches} branches from the open node of highest entropy, {segment} tokens each",
    needs={"engine:entropy"},
    bounds={"branches": "at least 2", "segment": "at least 0", "expansions": "at least 1"},
    impossible=_segments,
    cost=_frontier_cost,
)
def frontier(tree: Tree, *, branches: int = 4, segment: int = 200, expansions: int = 8) -> list[Branch]:
    """Each tree branches where the policy was least sure, wherever that is; then open ends are followed to theirs.

    expansions   how often a tree branches
    branches     edges of each time
    segment      tokens of an edge, in a control world decisions; 0: a whole turn
    """
    found: list[Branch] = []
    for task in range(len(tree.tasks)):
        mine = [i for i in tree.open() if tree.nodes[i].task == task]
        forks = sum(1 for node in tree.nodes if node.task == task and node.branches > 1)
        if mine and forks < expansions:
            doubt = [(-_entropy(tree, i), i) for i in mine]
            found.append(Branch(min(doubt)[1], branches, segment or None))
        else:
            found += [Branch(i, 1) for i in mine]
    return found


def _surprised_cost(held: Any, of: Lengths) -> Tokens:
    rows = held.first * (1 + held.most)
    return rows * of.answer, rows * (of.prompt + of.context)


@part(
    "grow",
    equation="{first} episodes, and {more} more from each turn that is {above} nats less sure than the first",
    needs={"engine:entropy"},
    bounds={
        "first": "at least 1",
        "more": "at least 1",
        "above": "any number",
        "most": "at least 1",
    },
    impossible=lambda held, method, world: (
        [("", "episodes have a single turn")] if getattr(world, "turn_cap", 0) == 1 else []
    ),
    cost=_surprised_cost,
)
def surprised(
    tree: Tree, *, first: int = 4, more: int = 2, above: float = 0.2, most: int = 4
) -> list[Branch]:
    """Episodes turn by turn, and more from where a reply of the world has made the policy unsure (ARPO's idea).

    A turn's entropy is compared with the mean of the task's first turns.

    first   episodes from the start of a task
    more    episodes that branch off where a turn is surprising
    above   by how many nats it must be less sure
    most    surprises of a task that are followed
    """
    found: list[Branch] = []
    for root in range(len(tree.tasks)):
        mine = [i for i, node in enumerate(tree.nodes) if node.task == root and i != root]
        begun = [tree.nodes[i].entropy for i in tree.children(root)]
        if not begun:
            found.append(Branch(root, first))
            continue
        usual = sum(begun) / len(begun)
        followed = sum(1 for i in mine if tree.nodes[i].branches > 1)
        unsure = [i for i in mine if tree.nodes[i].branches == 1 and _after(tree, i) > usual + above]
        found += [Branch(i, more) for i in unsure[: most - followed]]
        found += [Branch(i, 1) for i in mine if not tree.nodes[i].ended and not tree.nodes[i].branches]
    return found


def _after(tree: Tree, node: int) -> float:
    """The entropy of the one turn that followed a node."""
    return tree.nodes[tree.children(node)[0]].entropy


def _entropy(tree: Tree, node: int) -> float:
    """Of the edge that led to a node; a tree's first node is the most doubtful of all."""
    entropy = tree.nodes[node].entropy
    return math.inf if math.isnan(entropy) else entropy
