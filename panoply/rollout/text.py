"""From a text world to experience: tasks in, graded episodes out."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from panoply.errors import PanoplyError, Resumable
from panoply.experience import (
    DEMONSTRATION,
    OPEN,
    OWN,
    TEACHER,
    TERMINATED,
    TRUNCATED,
    Column,
    Experience,
    Ragged,
    Segments,
    Table,
)
from panoply.policies.text import TextPolicy
from panoply.rollout.answer_likelihood import answer_likelihood
from panoply.rollout.engine import Complete, Request, TextEngine, Turn
from panoply.rollout.order import InOrder
from panoply.rollout.sampling import Sampling
from panoply.seeds import numpy_rng, stable_hash
from panoply.worlds.world import Lesson, OneTurn, Play, Reply, Signal, Task, TextWorld

if TYPE_CHECKING:
    from panoply.rollout.text_tree import TextTree

Temperature = float | Callable[[Tensor], Tensor]


class Collector(InOrder[Task]):
    """Draws training tasks in order and lets the policy, or the world's teacher, act on them.

    What it must remember to go on is a few counters (`state`), so a resumed run sees the same tasks and draws.
    """

    def __init__(
        self,
        world: TextWorld,
        policy: TextPolicy,
        seed: int,
        split: str = "train",
        needs: frozenset[str] = frozenset(),
    ):
        self.world, self.seed, self.split = world, seed, split
        self.policy: TextPolicy = policy
        self.needs = needs
        """Columns asked for that only world and policy together can give: `answer_likelihood`."""
        self._engine = TextEngine(policy.model, policy.tokenizer)
        self.state = {"tasks": 0, "groups": 0, "episodes": 0, "decisions": 0}
        self.version = 0

    @property
    def engine(self) -> TextEngine:
        """Samples from who acts."""
        if self._engine.model is not self.policy.model:
            self._engine = TextEngine(self.policy.model, self.policy.tokenizer)
        return self._engine

    def failures(self) -> dict[str, int]:
        """Why answers could not be graded, and how often."""
        return self.world.failures()

    def close(self) -> None:
        """Let go of what the world has started."""
        self.world.close()

    def task(self, index: int) -> Task:
        return self.world.task(self.split, index)

    def episodes(
        self,
        tasks: Sequence[Task],
        group: int | Sequence[int] = 1,
        *,
        into: Tensor | None = None,
        temperature: Temperature = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        max_tokens: int | None = None,
    ) -> Experience:
        """A group of the policy's own episodes for each task, with the world's signals on their last decisions.

        group   how many episodes: one number for all tasks, or one for each
        into    keys of groups that the episodes join, one a task; left out, every task has a new group
        """
        sampling = self._sampling(temperature, top_p, top_k, min_p, repetition_penalty, max_tokens)
        asked, keys = self._groups(tasks, group, into)
        first = self.state["episodes"]
        seeds = [self._draw(first + i) for i in range(len(asked))]
        plays = [self.world.play(task) for task in asked]
        played = (
            self._markov(plays, seeds, sampling)
            if self.world.markov
            else self._appended(plays, seeds, sampling)
        )
        return self._experience(asked, keys, *played)

    def _appended(self, plays: list[Play], seeds: list[int], sampling: Sampling) -> Played:
        """Turns in one context each episode: the world's observations are appended to what came before."""
        log = _Log(plays)

        def on_stop(turn: Turn) -> Sequence[int] | None:
            reply = log.act(turn.row, turn.turn, turn.sampled)
            return None if reply.done else reply.observation

        single = type(self.world).play is TextWorld.play
        starts: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for row, play in enumerate(plays):
            starts[play.prompt].append(row)
        requests = [Request(prompt, [seeds[r] for r in rows]) for prompt, rows in starts.items()]
        order = torch.tensor([r for rows in starts.values() for r in rows])
        log.rows = order.tolist()
        ending = None if single else on_stop
        rollouts = self.engine.generate(requests, sampling, ending, complete=self._complete, entropy=True)
        if single:
            log.grade(self.world, rollouts.completions())
        decisions = rollouts.decisions
        decisions = decisions.plus({"episode": order[decisions.tensor("context")]})
        return decisions, rollouts.context, log

    def _markov(self, plays: list[Play], seeds: list[int], sampling: Sampling) -> Played:
        """Turns in contexts of their own: an observation is the whole of the next prompt.

        Equal observations, of whichever episode and turn, are one prompt: it is prefilled once a round, and
        stands once in a training row.
        """
        log = _Log(plays)
        rounds: list[tuple[Table, Table]] = []
        live, prompts, first = list(range(len(plays))), [p.prompt for p in plays], 0
        numbers: dict[tuple[int, ...], int] = {}
        for turn in itertools.count():
            if not live:
                break
            log.rows = live
            requests = [Request(prompts[r], [stable_hash(seeds[r], turn)]) for r in live]
            rollouts = self.engine.generate(requests, sampling, complete=self._complete, entropy=True)
            decisions, context = rollouts.decisions, rollouts.context
            row = decisions.tensor("context")
            moved: dict[str, Column] = {
                "episode": torch.tensor(live)[row],
                "turn": torch.full_like(row, turn),
                "context": row + first,
            }
            if sampling.temperatures() is not None and "temperature" not in decisions:
                moved["temperature"] = torch.ones(len(row))
            prompt = torch.tensor([numbers.setdefault(prompts[r], len(numbers)) for r in live])
            rounds.append((decisions.plus(moved), context.plus({"prompt": prompt})))
            first += len(live)
            replies = [log.act(i, turn, answer) for i, answer in enumerate(rollouts.completions())]
            for r, reply in zip(live, replies, strict=True):
                prompts[r] = tuple(reply.observation)
            live = [r for r, reply in zip(live, replies, strict=True) if not reply.done]
        return Table.cat([d for d, _ in rounds]), Table.cat([c for _, c in rounds]), log

    @cached_property
    def _complete(self) -> Complete | None:
        """The world's word on when a turn is complete, where it has one."""
        return None if type(self.world).complete is TextWorld.complete else self.world.complete

    def tree(self, tasks: Sequence[Task], temperature: float = 1.0) -> TextTree:
        """A tree of the policy's own episodes for each task, of which nothing has grown yet."""
        from panoply.rollout.text_tree import TextTree

        return TextTree(self, tasks, temperature)

    def prefix_values(self, tasks: Sequence[Task], prefixes: Sequence[Sequence[int]], samples: int) -> Tensor:
        """V̂ of unfinished answers: the mean success of so many of the policy's own continuations of each.

        Continuations that could not be graded are left out. For worlds of one turn. The draws count
        as decisions, and as neither episodes nor tasks.
        """
        sampling = self._sampling(1.0)
        starts = [(*task.prompt, *prefix) for task, prefix in zip(tasks, prefixes, strict=True)]
        named = (self.seed, self.version, self.state["episodes"])
        requests = [
            Request(start, [stable_hash("continue", *named, i, s) for s in range(samples)])
            for i, start in enumerate(starts)
        ]
        rollouts = self.engine.generate(requests, sampling, complete=self._complete)
        self._count(rollouts.decisions)
        asked = [tasks[r] for r in rollouts.request.tolist()]
        answers = [
            [*prefixes[r], *rest]
            for r, rest in zip(rollouts.request.tolist(), rollouts.completions(), strict=True)
        ]
        graded = self.world.grade_all(asked, answers)
        worth = torch.tensor([[g["success"], 1.0] if g else [0.0, 0.0] for g in graded])
        found = torch.zeros(len(starts), 2).index_add(0, rollouts.request, worth)
        return found[:, 0] / found[:, 1].clamp(min=1)

    def _sampling(
        self,
        temperature: Temperature,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        max_tokens: int | None = None,
    ) -> Sampling:
        longest = self.world.max_tokens
        return Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k or None,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            max_tokens=min(max_tokens or longest, longest),
            stop_tokens=self.world.stop_tokens,
        )

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

    def teacher_pairs(self, tasks: Sequence[Task]) -> Experience:
        """A good answer and a bad one to each task for which the world has them."""
        first = self.state["episodes"]
        doubled: list[Task] = []
        lessons: list[list[Lesson]] = []
        for i, task in enumerate(tasks):
            pair = self.world.pair(task, numpy_rng("teacher", self.seed, first + i))
            if pair is not None:
                doubled += [task, task]
                lessons += [self.world.turns(task, answer) for answer in pair]
        if not doubled:
            raise PanoplyError(
                f"The teacher of {self.world.name} made no mistakes, so there are no pairs to learn from."
            )
        experience = self._given(doubled, lessons)
        chosen = torch.arange(first, first + len(doubled), 2)
        return experience.with_pairs(Table({"chosen": chosen, "rejected": chosen + 1}))

    def preferred(
        self, tasks: Sequence[Task], chosen: Sequence[Sequence[int]], rejected: Sequence[Sequence[int]]
    ) -> Experience:
        """Given pairs of answers, one pair a task."""
        first = self.state["episodes"]
        both = [answer for pair in zip(chosen, rejected, strict=True) for answer in pair]
        experience = self.answers([t for t in tasks for _ in range(2)], both, source=DEMONSTRATION)
        winners = torch.arange(first, first + 2 * len(tasks), 2)
        return experience.with_pairs(Table({"chosen": winners, "rejected": winners + 1}))

    # -------------------------------------------------------------- tables

    def _experience(
        self, tasks: Sequence[Task], groups: Sequence[int], decisions: Table, context: Table, log: _Log
    ) -> Experience:
        """Keys, signals and ends for the rows of played episodes, which are numbered 0… in the order of `tasks`."""
        key = decisions.tensor("episode") * 2**20 + decisions.tensor("turn")
        if bool((key[1:] < key[:-1]).any()):
            decisions = decisions.take(key.argsort(stable=True))
        row, turn = decisions.tensor("episode"), decisions.tensor("turn")
        self._count(decisions)
        episode = self._number(len(tasks))
        columns: dict[str, Column] = {
            **{name: column[row] for name, column in self._of_tasks(tasks).items()},
            "group": torch.tensor(groups)[row],
            "episode": episode[row],
            "version": torch.full_like(row, self.version),
            "source": torch.full_like(row, OWN),
            **self._acted(len(row)),
            **log.columns(row, turn, decisions.tensor("end")),
        }
        if "answer_likelihood" in self.needs:
            columns["answer_likelihood"] = answer_likelihood(
                self.world, self.policy, tasks, decisions, context
            )
        experience = Experience(decisions.plus(columns), context)
        if not log.failed:
            return experience
        graded = ~torch.isin(row, torch.tensor(log.failed))
        if self.split == "test":
            return experience.with_columns(graded=graded.float())
        if len(log.failed) == len(tasks):
            why = "; ".join(self.world.failures())
            raise Resumable(f"Not one of {len(tasks)} answers could be graded: {why}.")
        return experience.take(graded)

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
        prompt = torch.tensor([prompts.setdefault(p, len(prompts)) for _, _, p, _ in flat])
        shared = torch.tensor([len(p) for _, _, p, _ in flat])
        lengths = torch.tensor([len(answer) for *_, answer in flat])
        row = torch.arange(len(flat)).repeat_interleave(lengths)
        inside = torch.arange(len(row)) - (lengths.cumsum(0) - lengths)[row]
        of, turn = (column[row] for column in torch.tensor([[i, t] for i, t, _, _ in flat]).T)
        decisions: dict[str, Column] = {
            **{name: column[of] for name, column in self._of_tasks(tasks).items()},
            "group": self._joined(tasks, into)[of],
            "episode": self._number(len(tasks))[of],
            "turn": turn,
            "version": torch.full_like(row, self.version),
            "context": row,
            "position": shared[row] + inside,
            "action": torch.tensor([token for *_, answer in flat for token in answer]),
            "source": torch.full_like(row, source),
        }
        if played or all(len(turns) == 1 for turns in lessons):
            log = _Log([self.world.play(task) for task in tasks])
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

    def _joined(self, tasks: Sequence[Task], into: Tensor | None) -> Tensor:
        """The group of each given answer: one of `into`, or with the others to the same task a new one."""
        if into is not None:
            return torch.tensor(self._groups(tasks, 1, into)[1])
        same = {task.id: i for i, task in reversed(list(enumerate(tasks)))}
        first: int = self.state["groups"]
        self.state["groups"] += len(tasks)
        return torch.tensor([first + same[t.id] for t in tasks])

    def _of_tasks(self, tasks: Sequence[Task]) -> dict[str, Tensor]:
        """Keys that an episode has from its task: `task` and, where there are several kinds of problem, `domain`."""
        found = {"task": torch.tensor([t.id for t in tasks])}
        if "domain" in self.world.keys:
            found["domain"] = torch.tensor([stable_hash("domain", self.world.part_of(t)) for t in tasks])
        return found

    def _number(self, episodes: int) -> Tensor:
        first = self.state["episodes"]
        self.state["episodes"] += episodes
        return torch.arange(first, first + episodes)

    def _count(self, decisions: Table) -> None:
        self.state["decisions"] = self.state.get("decisions", 0) + decisions.rows

    def _draw(self, episode: int) -> int:
        return stable_hash("draw", self.seed, self.split, episode)


class _Log:
    """What the world said to each turn of each episode."""

    def __init__(self, plays: list[Play]):
        self.plays = plays
        self.rows: list[int] = []
        """The episode of each of the engine's rows."""
        self.replies: dict[tuple[int, int], tuple[int, Reply]] = {}
        self.failed: list[int] = []
        """Episodes that could not be graded."""

    def act(self, engine_row: int, turn: int, answer: Sequence[int]) -> Reply:
        row = self.rows[engine_row]
        before = self.plays[row].state
        reply = self.plays[row].act(answer)
        self.replies[row, turn] = (before, reply)
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
            "end": self._ends(end, row, [f[1] if f else None for f in found], last),
        }
        for name in names:
            signals = [f[1].signals.get(name, 0.0) if f else 0.0 for f in found]
            columns[f"signal:{name}"] = _placed(name, signals, turns, last)
        return columns

    def _ends(self, end: Tensor, row: Tensor, replies: list[Reply | None], last: Tensor) -> Tensor:
        """Truncated where the world says so, or where the engine cut the last turn short."""
        ends = torch.zeros_like(end)
        final = Segments(row).is_last()
        cuts = (r is None or r.truncated or not r.done for r in replies)
        of_turn = torch.tensor([TRUNCATED if cut else TERMINATED for cut in cuts])
        ends[last] = of_turn
        cut = (end == TRUNCATED) & final
        return torch.where(cut, TRUNCATED, torch.where(final, ends, OPEN))


Played = tuple[Table, Table, _Log]


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
