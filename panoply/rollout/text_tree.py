"""Trees of text: edges are segments of a turn, or whole turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from panoply.errors import PanoplyError, Resumable
from panoply.experience import OPEN, OWN, TERMINATED, TRUNCATED, Column, Experience, Segments, Table
from panoply.rollout.requests import Request
from panoply.rollout.tree import Branch, Node, Tree
from panoply.seeds import stable_hash
from panoply.worlds.world import Play, Signals, TextWorld, earned

if TYPE_CHECKING:
    from panoply.rollout.rollouts import Rollouts
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task


@dataclass
class _Stand:
    """An episode under way: its play, what the policy sees at the start of the turn, and what it has said in it."""

    play: Play
    seen: tuple[int, ...]
    said: list[int]

    def state(self) -> int:
        return stable_hash(self.play.state, *self.said) if self.said else self.play.state


class TextTree(Tree):
    """Edges with one prefix share it, and learn only what they add."""

    collect: Collector

    def __init__(self, collect: Collector, tasks: Sequence[Task], temperature: float = 1.0):
        super().__init__(collect, tasks, temperature)
        plays = [collect.world.play(task) for task in tasks]
        self._stands = [_Stand(play, play.prompt, []) for play in plays]
        self._tables: list[tuple[Table, Table]] = []
        self._first = collect.state["episodes"]
        self._one_turn = type(collect.world).play is TextWorld.play
        self.looked_at: int | None = None
        """Of how many decisions of an edge, its first, a node's entropy is the mean; none means of all."""

    def _together(self, branch: Branch) -> int:
        """The most tokens."""
        left = self.collect.world.max_tokens - len(self._stands[branch.node].said)
        if branch.tokens is None or branch.tokens >= left:
            return left
        if self.collect._complete is not None:
            raise PanoplyError(
                f"{self.collect.world.name} says itself when a turn is complete, so a branch is a whole turn."
            )
        return branch.tokens

    def _continue(self, at: Sequence[Branch]) -> None:
        collect, number = self.collect, int(self.collect._number(sum(b.times for b in at))[0])
        requests = []
        for branch in at:
            stand = self._stands[branch.node]
            seeds = [collect._draw(number + k) for k in range(branch.times)]
            requests.append(Request((*stand.seen, *stand.said), seeds, begun=len(stand.said)))
            number += branch.times
        sampling = collect._sampling(self.temperature, max_tokens=self._together(at[0]))
        stands = [self._stands[branch.node] for branch in at for _ in range(branch.times)]
        mask = collect._mask([stand.play for stand in stands], [stand.said for stand in stands])
        rollouts = collect.generate(requests, sampling, mask=mask, entropy=True)
        parents = [at[request].node for request in rollouts.request.tolist()]
        self._write(rollouts, parents)
        edges = Segments(rollouts.decisions.tensor("context"))
        means = self._entropies(rollouts.decisions, edges)
        sums = edges.sum(rollouts.decisions.tensor("logp").double()).tolist()
        first = len(self.nodes)
        for parent, said, end, mean, logp in zip(
            parents, rollouts.completions(), rollouts.end.tolist(), means, sums, strict=True
        ):
            self._add(parent, said, end, mean, logp)
        if self._one_turn:
            self._grade(range(first, len(self.nodes)))

    def _entropies(self, decisions: Table, edges: Segments) -> list[float]:
        if "entropy" not in decisions:
            return [math.nan] * len(edges)
        entropy = decisions.tensor("entropy")
        if self.looked_at is None:
            return edges.mean(entropy).tolist()
        position = decisions.tensor("position")
        first = position - edges.rows(edges.min(position)) < self.looked_at
        return (edges.sum(entropy * first) / edges.sum(first.float())).tolist()

    def _add(self, parent: int, said: list[int], end: int, entropy: float, logp: float) -> None:
        """The node that an edge leads to; where it ends a turn, the world has its say."""
        before, stand, world = self.nodes[parent], self._stands[parent], self.collect.world
        node = Node(parent, before.task, before.depth + 1, before.turn, entropy, earned={})
        node.decisions, node.logp = len(said), logp
        now = _Stand(stand.play, stand.seen, [*stand.said, *said])
        full = len(now.seen) + len(now.said) >= self.collect.policy.context_length
        if end == TERMINATED or full or len(now.said) >= world.max_tokens:
            node.turn += 1
            if self._one_turn:
                node.end = end
            else:
                node.end = self._act(node, now, end)
        self.nodes.append(node)
        self._stands.append(now)

    def _act(self, node: Node, stand: _Stand, end: int) -> int:
        """Take the turn in a fork of the play, and say how it ends, if it does."""
        world, play = self.collect.world, stand.play.fork()
        reply = play.act(stand.said)
        self.collect.count_signals([reply.signals])
        node.earned = _numbers(reply.signals)
        seen = tuple(reply.observation)
        stand.seen = seen if world.markov else (*stand.seen, *stand.said, *seen)
        stand.play, stand.said = play, []
        if reply.done:
            return TRUNCATED if reply.truncated or end == TRUNCATED else TERMINATED
        return TRUNCATED if len(stand.seen) >= self.collect.policy.context_length else OPEN

    def _grade(self, new: range) -> None:
        """Answers of one turn, all at once."""
        over = [i for i in new if self.nodes[i].ended]
        if not over:
            return
        tasks = [self.tasks[self.nodes[i].task] for i in over]
        graded = self.collect.world.grade_all(tasks, [self._stands[i].said for i in over])
        self.collect.count_signals([signals for signals in graded if signals is not None])
        for i, signals in zip(over, graded, strict=True):
            self.nodes[i].earned = None if signals is None else _numbers(signals)

    # -------------------------------------------------------------- tables

    def _write(self, rollouts: Rollouts, parents: Sequence[int]) -> None:
        """Decisions and contexts with numbers of their own: contexts after earlier ones, prompts by the node."""
        decisions, row = rollouts.decisions, rollouts.decisions.tensor("context")
        group = torch.tensor([self.nodes[p].group for p in parents])
        moved: dict[str, Column] = {
            "context": row + len(self._edges()),
            "group": group[row],
            "turn": torch.tensor([self.nodes[p].turn for p in parents])[row],
            "state": torch.tensor([self._stands[p].state() for p in parents])[row],
        }
        if self.temperature != 1 and "temperature" not in decisions:
            moved["temperature"] = torch.ones(len(row))
        self._tables.append((decisions.plus(moved), rollouts.context.plus({"prompt": group})))

    def trajectories(self, ends: Sequence[int]) -> Experience:
        """Whole episodes from a task's start, one for each of some ends, those of a task a group.

        What several have in common is in each of them, with what its turns earned; where every turn has a prompt of its
        own, with contexts of its own. Column `node` says to which node a decision leads. All that was sampled for the
        tree is counted, once, whether it is in one of them or not.
        """
        self._refuse_ungraded()
        decisions, context = (Table.cat(list(several)) for several in zip(*self._tables, strict=True))
        self.collect._count(decisions)
        roots, edge = len(self.tasks), decisions.tensor("context")
        count = edge.bincount(minlength=len(self._edges()))
        first = count.cumsum(0) - count
        paths, over = [self._path(end) for end in ends], [self.nodes[end] for end in ends]
        node = torch.tensor([n for path in paths for n in path])
        sizes = count[node - roots]
        row = torch.arange(len(node)).repeat_interleave(sizes)
        inside = torch.arange(len(row)) - (sizes.cumsum(0) - sizes)[row]
        of = torch.tensor([i for i, path in enumerate(paths) for _ in path])[row]
        tasks = [self.tasks[end.task] for end in over]
        done, selves, markov = Segments(row).is_last(), self.collect.selves, self.collect.world.markov
        columns: dict[str, Column] = {
            **{name: column[of] for name, column in self.collect._of_tasks(tasks).items()},
            "node": node[row],
            "context": row if markov else of,
            "group": torch.tensor([self.nodes[end.task].group for end in over])[of],
            "episode": self._first + torch.tensor(ends)[of] - roots,
            "version": torch.full_like(of, self.collect.version),
            "source": torch.full_like(of, OWN),
            **({"actor": torch.full_like(of, self.collect.actor)} if selves and selves.actors else {}),
            "end": torch.tensor([end.end for end in over])[of].masked_fill(~Segments(of).is_last(), OPEN),
        }
        for name in sorted({name for n in node.tolist() for name in self.nodes[n].earned or ()}):
            value = torch.tensor([(n.earned or {}).get(name, 0.0) for n in self.nodes])
            columns[f"signal:{name}"] = value[node[row]] * done
        taken = decisions.take(first[node - roots][row] + inside).plus(columns)
        if markov:
            return Experience(taken, context.take(node - roots))
        prompts = torch.tensor([end.task for end in over])
        shared = torch.tensor([len(task.prompt) for task in tasks])
        whole = context.take(torch.tensor(ends) - roots).plus({"prompt": prompts, "shared": shared})
        return Experience(taken, whole)

    def _path(self, end: int) -> list[int]:
        """The nodes from a task's first turn to an end."""
        path = [end]
        while self.nodes[path[-1]].parent >= len(self.tasks):
            path.append(self.nodes[path[-1]].parent)
        return path[::-1]

    def _refuse_ungraded(self) -> None:
        over = [e for e in self._edges() if e.ended]
        if over and all(e.earned is None for e in over):
            why = "; ".join(self.collect.world.failures())
            raise Resumable(f"Not one of {len(over)} answers could be graded: {why}.")

    def experience(self) -> Experience:
        edges, worth = self._edges(), self.worth()[len(self.tasks) :]
        self._refuse_ungraded()
        decisions, context = (Table.cat(list(several)) for several in zip(*self._tables, strict=True))
        self.collect._count(decisions)
        row = decisions.tensor("context")
        last = Segments(row).is_last()
        parent, depth = self._family(self._first)
        tasks = self.collect._of_tasks([self.tasks[e.task] for e in edges])
        selves = self.collect.selves
        columns: dict[str, Column] = {
            **{name: column[row] for name, column in tasks.items()},
            "episode": self._first + row,
            "parent": parent[row],
            "segment": depth[row],
            "version": torch.full_like(row, self.collect.version),
            "source": torch.full_like(row, OWN),
            **({"actor": torch.full_like(row, self.collect.actor)} if selves and selves.actors else {}),
            "end": torch.tensor([e.end for e in edges])[row].masked_fill(~last, OPEN),
        }
        for name in sorted({name for w in worth for name in w or ()}):
            value = torch.tensor([(w or {}).get(name, 0.0) for w in worth])
            columns[f"signal:{name}"] = value[row] * last
        experience = Experience(decisions.plus(columns), context)
        graded = torch.tensor([w is not None for w in worth])[row]
        return experience if bool(graded.all()) else experience.take(graded)


def _numbers(signals: Signals) -> dict[str, float]:
    return {name: earned(signal) for name, signal in signals.items()}
