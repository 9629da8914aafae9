"""What collectors share. Of every kind: the order in which they take tasks, groups, and who acts; of text: answers that
are given, by a teacher or a file, and what the world replies to answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import (
    DEMONSTRATION,
    OPEN,
    REPLAY,
    TEACHER,
    TERMINATED,
    TRUNCATED,
    Column,
    Experience,
    Ragged,
    Segments,
    Table,
)
from panoply.seeds import numpy_rng, stable_hash, torch_rng
from panoply.selves import LEARNER
from panoply.worlds.world import Lesson, OneTurn, Play, Reply, Signal, Task, TextWorld

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

    world: Any
    seed: int
    split: str
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
    """Who acts, as the column `actor` says it where more than one may: 0 is the learner."""
    counted: str | None = None
    """A signal whose sum is kept in `state`, as `signal:NAME`, where a budget is counted by it."""
    members: Any = None
    """A `Pool` of frozen selves of the policy, where a part needs `members`."""
    notes: Mapping[str, float] = {}
    """What a sample part counted, which the step then has among its metrics."""

    def task(self, index: int) -> T:
        found: T = self.world.task(self.split, index)
        return found

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
        return self._first + number

    @cached_property
    def _first(self) -> int:
        return stable_hash("tasks", self.seed) >> 16

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

    def recurring(self, n: int, pool: int) -> list[T]:
        """The next `n` of a pool of different training tasks: all of them once, then all again in another order."""
        tasks = self.different(pool)
        return [tasks[i] for i in self.shuffled(n, pool)]

    def different(self, n: int) -> list[T]:
        """The first `n` different training tasks. They do not count as tasks taken."""
        kept: dict[int, list[T]] = self.__dict__.setdefault("_different", {})
        if n not in kept:
            found: dict[Any, T] = {}
            for task in (self.task(self.place(i)) for i in range(64 * n)):
                found.setdefault(getattr(task, "id", task), task)
                if len(found) == n:
                    break
            if len(found) < n:
                raise PanoplyError(
                    f"{self.world.name} has too few problems for a pool of {n}: {len(found)} were found. "
                    "Lower sample.pool."
                )
            kept[n] = list(found.values())
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


def in_epochs(seed: int, first: int, n: int, among: int) -> list[int]:
    """`n` places of an endless order from `first` on, in which every `among` of them are a new permutation."""
    found: list[int] = []
    while n > 0:
        epoch, at = divmod(first, among)
        order = torch.randperm(among, generator=torch_rng("pairs", seed, epoch))[at : at + n].tolist()
        found, first, n = [*found, *order], first + len(order), n - len(order)
    return found


# ------------------------------------------------------------------ of text


class Given(InOrder[Task]):
    """Gives experience that no policy of ours made: answers of the world's teacher, of a file, or of anybody."""

    world: TextWorld
    needs: frozenset[str] = frozenset()

    @cached_property
    def asked(self) -> dict[int, Task]:
        """Tasks by their ids: held-out ones, to tell results apart by what was asked, and others where a part needs
        `asked`."""
        return {}

    def demonstrations(self, tasks: Sequence[Task]) -> Experience:
        """One demonstration a task by the world's careless teacher."""
        first = self.state["episodes"]
        rngs = (numpy_rng("teacher", self.seed, first + i) for i in range(len(tasks)))
        return self._given(tasks, [self.world.lessons(t, rng) for t, rng in zip(tasks, rngs, strict=True)])

    def references(self, n: int, pool: int) -> Experience:
        """Reference answers to `n` tasks of a fixed pool, chosen anew each time, as a teacher's stream."""
        rng = numpy_rng("references", self.seed, self.state["episodes"])
        first = stable_hash("pool", self.seed) >> 16
        tasks = [self.world.task(self.split, first + int(i)) for i in rng.integers(pool, size=n)]
        return self.answers(tasks, [self.world.gold(t) for t in tasks])

    def answers(
        self,
        tasks: Sequence[Task],
        answers: Sequence[Sequence[int]],
        *,
        into: Tensor | None = None,
        source: int = TEACHER,
    ) -> Experience:
        """Given answers, one a task, with the signals they earn and without `logp`: no policy of ours said them.

        into     keys of groups that they join, one each; left out, answers to one task are a group of their own
        source   whose they are, which decides the stream that learns from them
        """
        given = zip(tasks, answers, strict=True)
        lessons = [self.world.turns(task, answer) for task, answer in given]
        return self._given(tasks, lessons, into=into, source=source, played=True)

    def told(self, tasks: Sequence[Task], lessons: Sequence[Sequence[Lesson]], into: Tensor) -> Experience:
        """Episodes that a policy played elsewhere, turn by turn, without `logp` and signals, which whoever knows adds.

        into   keys of groups that they join, one each
        """
        return self._given(tasks, lessons, into=into, source=REPLAY)

    def teacher_pairs(self, tasks: Sequence[Task]) -> Experience:
        """A good answer and a bad one to each task for which the world has them, and what else is known of the pair.

        Where a preference is not certain (`p`), the pair is turned round as often as people would turn it, and p with
        it: losses that know p are the same either way, and all others learn from it on the mean.
        """
        first = self.state["episodes"]
        doubled: list[Task] = []
        lessons: list[list[Lesson]] = []
        known: list[Mapping[str, float]] = []
        for i, task in enumerate(tasks):
            rng = numpy_rng("teacher", self.seed, first + i)
            pair = self.world.pair(task, rng)
            if pair is None:
                continue
            facts = dict(self.world.known_of_pair(task))
            if rng.random() >= facts.get("p", 1.0):
                pair, facts["p"] = pair[::-1], 1 - facts["p"]
            doubled += [task, task]
            lessons += [self.world.turns(task, answer) for answer in pair]
            known.append(facts)
        if not doubled:
            raise PanoplyError(
                f"The teacher of {self.world.name} made no mistakes, so there are no pairs to learn from."
            )
        experience = self._given(doubled, lessons)
        chosen = torch.arange(first, first + len(doubled), 2)
        return experience.with_pairs(Table({"chosen": chosen, "rejected": chosen + 1, **_facts(known)}))

    def preferred(
        self, tasks: Sequence[Task], chosen: Sequence[Sequence[int]], rejected: Sequence[Sequence[int]]
    ) -> Experience:
        """Given pairs of answers, one pair a task."""
        first = self.state["episodes"]
        both = [answer for pair in zip(chosen, rejected, strict=True) for answer in pair]
        experience = self.answers([t for t in tasks for _ in range(2)], both, source=DEMONSTRATION)
        winners = torch.arange(first, first + 2 * len(tasks), 2)
        return experience.with_pairs(Table({"chosen": winners, "rejected": winners + 1}))

    def _given(
        self,
        tasks: Sequence[Task],
        lessons: Sequence[Sequence[Lesson]],
        *,
        into: Tensor | None = None,
        source: int = DEMONSTRATION,
        played: bool = False,
    ) -> Experience:
        """Foreign episodes. `played` ones did what they say; a lesson of several turns says what was not done."""
        flat = [(i, turn, *lesson) for i, turns in enumerate(lessons) for turn, lesson in enumerate(turns)]
        prompts: dict[tuple[int, ...], int] = {}
        prompt = torch.tensor([prompts.setdefault(p, len(prompts)) for _, _, p, _ in flat], dtype=torch.long)
        shared = torch.tensor([len(p) for _, _, p, _ in flat], dtype=torch.long)
        lengths = torch.tensor([len(answer) for *_, answer in flat], dtype=torch.long)
        row = torch.arange(len(flat)).repeat_interleave(lengths)
        inside = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
        of, turn = (
            column[row]
            for column in torch.tensor([[i, t] for i, t, _, _ in flat], dtype=torch.long).view(-1, 2).T
        )
        decisions: dict[str, Column] = {
            **{name: column[of] for name, column in self._of_tasks(tasks).items()},
            "group": self._joined(tasks, into)[of],
            "episode": self._number(len(tasks))[of],
            "turn": turn,
            "version": torch.full_like(row, self.version),
            "context": row,
            "position": shared[row] + inside,
            "action": torch.tensor([token for *_, answer in flat for token in answer], dtype=torch.long),
            "source": torch.full_like(row, source),
        }
        if played or all(len(turns) == 1 for turns in lessons):
            log = Replies([self.world.play(task) for task in tasks])
            log.rows = list(range(len(tasks)))
            for i, at, _, answer in flat:
                log.act(i, at, answer)
            decisions |= log.columns(of, turn, torch.zeros_like(row))
        else:
            states = [tasks[i].id if not t else stable_hash(tasks[i].id, t) for i, t, _, _ in flat]
            decisions["state"] = torch.tensor(states)[row]
            decisions["end"] = torch.where(Segments(of).is_last(), TERMINATED, OPEN)
        self._count(Table(decisions))
        tokens = Ragged.from_lists([[*p, *answer] for _, _, p, answer in flat])
        return Experience(Table(decisions), Table({"tokens": tokens, "prompt": prompt, "shared": shared}))

    def again(self, rows: Experience, episodes: Sequence[int]) -> Experience:
        """Episodes that were given before, as if they were given now: with keys of their own, and counted.

        rows       whole episodes one after another, as `answers` gives them
        episodes   which of them, by their places, as often as they are named
        """
        counts = rows.by("episode").count
        first = counts.cumsum(0) - counts
        which = torch.tensor(episodes, dtype=torch.long)
        sizes = counts[which]
        start = (first[which] - (sizes.cumsum(0) - sizes)).repeat_interleave(sizes)
        taken = rows.take(start + torch.arange(len(start)))
        groups = torch.arange(len(which)) + self.state["groups"]
        self.state["groups"] += len(which)
        self._count(taken.decisions)
        return taken.with_columns(
            episode=self._number(len(which)).repeat_interleave(sizes),
            group=groups.repeat_interleave(sizes),
            version=torch.full((len(taken),), self.version),
        )

    def _joined(self, tasks: Sequence[Task], into: Tensor | None) -> Tensor:
        """The group of each given answer: one of `into`, or with the others to the same task a new one."""
        if into is not None:
            return torch.tensor(self._groups(tasks, 1, into)[1])
        same = {task.id: i for i, task in reversed(list(enumerate(tasks)))}
        first: int = self.state["groups"]
        self.state["groups"] += len(tasks)
        return torch.tensor([first + same[t.id] for t in tasks], dtype=torch.long)

    def _of_tasks(self, tasks: Sequence[Task]) -> dict[str, Tensor]:
        """Keys that an episode has from its task: `task` and, where there are several kinds of problem, `domain`."""
        if self.split == "test" or "asked" in self.needs:
            self.asked |= {task.id: task for task in tasks}
        found = {"task": torch.tensor([t.id for t in tasks], dtype=torch.long)}
        if "domain" in self.world.keys:
            kinds = [stable_hash("domain", self.world.part_of(t)) for t in tasks]
            found["domain"] = torch.tensor(kinds, dtype=torch.long)
        return found

    def _number(self, episodes: int) -> Tensor:
        first = self.state["episodes"]
        self.state["episodes"] += episodes
        return torch.arange(first, first + episodes)

    def _count(self, decisions: Table) -> None:
        self.state["decisions"] = self.state.get("decisions", 0) + decisions.rows


UNKNOWN = {"p": 1.0, "margin": 0.0, "annotator": -1.0}
"""What stands in a column of pairs for one of which nothing is known, where something is of others."""


def _facts(known: Sequence[Mapping[str, float]]) -> dict[str, Tensor]:
    """Columns of pairs, of what is known of at least one of them."""
    names = dict.fromkeys(name for facts in known for name in facts)
    columns = {name: torch.tensor([facts.get(name, UNKNOWN[name]) for facts in known]) for name in names}
    return {name: column.long() if name == "annotator" else column for name, column in columns.items()}


class Replies:
    """What the world said to each turn of each episode, and that it was cut off where it has had all of its `turns`."""

    def __init__(self, plays: list[Play], turns: int | None = None):
        self.plays, self.turns = plays, turns
        self.rows: list[int] = []
        """The episode of each of the engine's rows."""
        self.replies: dict[tuple[int, int], tuple[int, Reply]] = {}
        self.failed: list[int] = []
        """Episodes that could not be graded."""

    def act(self, engine_row: int, turn: int, answer: Sequence[int]) -> Reply:
        row = self.rows[engine_row]
        before = self.plays[row].state
        return self._noted(row, turn, before, self.plays[row].act(answer))

    def act_all(self, world: TextWorld, said: Sequence[tuple[int, int, Sequence[int]]]) -> list[Reply]:
        """Turns that ended together: the engine's row, the number of the turn, and what was said."""
        plays = [self.plays[self.rows[row]] for row, _, _ in said]
        before = [play.state for play in plays]
        replies = list(world.act_all(plays, [answer for _, _, answer in said]))
        return [
            self._noted(self.rows[row], turn, state, reply)
            for (row, turn, _), state, reply in zip(said, before, replies, strict=True)
        ]

    def _noted(self, row: int, turn: int, before: int, reply: Reply) -> Reply:
        if not reply.done and turn + 1 == self.turns:
            reply = dataclasses.replace(reply, done=True, truncated=True)
        self.replies[row, turn] = (before, reply)
        self.failed += [row] if reply.failed else []
        return reply

    def grade(self, world: TextWorld, answers: list[list[int]]) -> None:
        """Single turns, all at once."""
        plays = [self.plays[row] for row in self.rows]
        tasks = [play.task for play in plays if isinstance(play, OneTurn)]
        for row, play, signals in zip(self.rows, plays, world.grade_all(tasks, answers), strict=True):
            if signals is None:
                self.failed.append(row)
            self.replies[row, 0] = (play.state, Reply(signals or {"success": 0.0}))

    def columns(self, row: Tensor, turn: Tensor, end: Tensor) -> dict[str, Column]:
        """`state`, the signals on the last decision of the turn that earned them, and how episodes ended."""
        turns = Segments(row * 2**20 + turn)
        found = [self.replies.get(divmod(key, 2**20)) for key in turns.keys.tolist()]
        last = turns.is_last().nonzero().flatten()
        names = sorted({name for f in found if f is not None for name in f[1].signals})
        columns: dict[str, Column] = {
            "state": turns.rows(torch.tensor([f[0] if f else 0 for f in found], dtype=torch.long)),
            "end": self._ends(end, turns, [f[1] if f else None for f in found], last),
        }
        for name in names:
            signals = [f[1].signals.get(name, 0.0) if f else 0.0 for f in found]
            columns[f"signal:{name}"] = _placed(name, signals, turns, last)
        return columns

    def _ends(self, end: Tensor, turns: Segments, replies: list[Reply | None], last: Tensor) -> Tensor:
        """Truncated where the world says so, or where the engine cut the last turn short."""
        episode = turns.keys >> 20
        final = torch.ones_like(episode, dtype=torch.bool)
        final[:-1] = episode[1:] != episode[:-1]
        cuts = (r is None or r.truncated or not r.done for r in replies)
        of_turn = torch.tensor([TRUNCATED if cut else TERMINATED for cut in cuts], dtype=torch.long)
        of_turn = torch.where(end[last] == TRUNCATED, TRUNCATED, of_turn)
        return torch.zeros_like(end).index_copy(0, last, torch.where(final, of_turn, OPEN))


def _placed(name: str, signals: Sequence[Signal], turns: Segments, last: Tensor) -> Tensor:
    """A column: a number on the last decision of its turn and zero before it, a list on the turn's decisions."""
    column = torch.zeros(len(turns.index))
    column[last] = torch.tensor([0.0 if isinstance(s, Sequence) else s for s in signals])
    for at, given in ((at, s) for at, s in enumerate(signals) if isinstance(s, Sequence)):
        end, size = int(last[at]) + 1, int(turns.count[at])
        if len(given) != size:
            raise PanoplyError(
                f"The signal '{name}' has {len(given)} numbers for {size} tokens of an answer."
            )
        column[end - size : end] = torch.tensor(given)
    return column
