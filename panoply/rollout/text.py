"""From a text world to experience: tasks in, graded episodes out."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from panoply.errors import PanoplyError, Resumable
from panoply.experience import (
    BLANK,
    OWN,
    Column,
    Experience,
    Table,
)
from panoply.policies.moving import checksum, moving
from panoply.policies.text import TextPolicy
from panoply.rollout.answer_likelihood import answer_likelihood
from panoply.rollout.collector import Given, Replies
from panoply.rollout.engine import Complete, OnStop, Request, Rollouts, Turn
from panoply.rollout.engines import Engine, engine_of
from panoply.rollout.masks import BatchMask, of_plays
from panoply.rollout.sampling import Heat, Sampling
from panoply.seeds import stable_hash
from panoply.tables import picked
from panoply.worlds.world import Play, Signals, Task, TextWorld, earned

if TYPE_CHECKING:
    from panoply.rollout.text_tree import TextTree

Temperature = float | Callable[[Tensor], Tensor]


class Collector(Given):
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
        engine: str = "native",
    ):
        self.world, self.seed, self.split = world, seed, split
        self.policy: TextPolicy = policy
        self.needs = needs
        """Columns asked for that only world and policy together can give: `answer_likelihood`."""
        self._named, self._engine = engine, engine_of(policy, engine)
        self.state = {"tasks": 0, "groups": 0, "episodes": 0, "decisions": 0, "decode_steps": 0}
        self.version = 0
        self._heat: Heat | None = None

    @property
    def engine(self) -> Engine:
        """Samples from who acts. One that has weights of its own is given those of now, before it is first asked."""
        if self._engine.model is not self.policy.model:
            self._engine = engine_of(self.policy, self._named)
        if self._engine.version is not None and self._engine.version != self.version:
            publish(self._engine, self.policy, self.version)
        return self._engine

    def failures(self) -> dict[str, int]:
        """Why answers could not be graded, and how often."""
        return self.world.failures()

    def close(self) -> None:
        """Let go of what the world has started."""
        self.world.close()

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
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        max_tokens: int | None = None,
        turns: int | None = None,
        prefixes: Sequence[Tensor | None] = (),
    ) -> Experience:
        """A group of the policy's own episodes for each task, with the world's signals on their last decisions.

        group      how many episodes: one number for all tasks, or one for each
        into       keys of groups that the episodes join, one a task; left out, every task has a new group
        turns      after so many an episode is cut off (`end` 2); left out, the world's own cap
        prefixes   [n, width] vectors that the policy reads before the prompt, for each episode, or none
        """
        penalties = (repetition_penalty, presence_penalty, frequency_penalty)
        sampling = self._sampling(temperature, top_p, top_k, min_p, *penalties, max_tokens)
        check_turns(turns)
        asked, keys = self._groups(tasks, group, into)
        first = self.state["episodes"]
        seeds = [self._draw(first + i) for i in range(len(asked))]
        plays = [self.world.play(task) for task in asked]
        if self.world.markov and prefixes:
            raise PanoplyError(
                f"Every turn in {self.world.name} has a prompt of its own, and a prefix is of one."
            )
        played = (
            self._markov(plays, seeds, sampling, turns)
            if self.world.markov
            else self._appended(plays, seeds, sampling, turns, prefixes)
        )
        return self._experience(asked, keys, *played)

    @contextmanager
    def heated(self, heat: Heat | None) -> Iterator[None]:
        """Let temperatures depend for a while on what is drawn from: `heat` turns logits into factors."""
        before, self._heat = self._heat, heat
        try:
            yield
        finally:
            self._heat = before

    def _appended(
        self,
        plays: list[Play],
        seeds: list[int],
        sampling: Sampling,
        turns: int | None = None,
        prefixes: Sequence[Tensor | None] = (),
    ) -> Played:
        """Turns in one context each episode: the world's observations are appended to what came before."""
        log = Replies(plays, turns)

        def on_stop(turns: Sequence[Turn]) -> list[Sequence[int] | None]:
            said = [(turn.row, turn.turn, turn.sampled) for turn in turns]
            return [None if reply.done else reply.observation for reply in log.act_all(self.world, said)]

        single = type(self.world).play is TextWorld.play
        starts: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
        given = dict(enumerate(prefixes))
        for row, play in enumerate(plays):
            if (prefix := given.get(row)) is None:
                starts[play.prompt, -1].append(row)
            else:
                starts[(*(BLANK,) * len(prefix), *play.prompt), row].append(row)
        requests = [
            Request(prompt, [seeds[r] for r in rows], prefix=given.get(alone))
            for (prompt, alone), rows in starts.items()
        ]
        order = torch.tensor([r for rows in starts.values() for r in rows])
        log.rows = order.tolist()
        ending, mask = None if single else on_stop, self._mask([plays[r] for r in log.rows])
        rollouts = self.generate(requests, sampling, ending, mask=mask, entropy=True)
        if single:
            log.grade(self.world, rollouts.completions())
        decisions = rollouts.decisions
        decisions = decisions.plus({"episode": picked(order, decisions.tensor("context"))})
        return decisions, rollouts.context, log

    def _markov(
        self, plays: list[Play], seeds: list[int], sampling: Sampling, turns: int | None = None
    ) -> Played:
        """Turns in contexts of their own: an observation is the whole of the next prompt.

        Equal observations, of whichever episode and turn, are one prompt: it is prefilled once a round, and
        stands once in a training row.
        """
        log = Replies(plays, turns)
        rounds: list[tuple[Table, Table]] = []
        live, prompts, first = list(range(len(plays))), [p.prompt for p in plays], 0
        numbers: dict[tuple[int, ...], int] = {}
        for turn in itertools.count():
            if not live:
                break
            log.rows = live
            requests = [Request(prompts[r], [stable_hash(seeds[r], turn)]) for r in live]
            mask = self._mask([plays[r] for r in live])
            rollouts = self.generate(requests, sampling, mask=mask, entropy=True)
            decisions, context = rollouts.decisions, rollouts.context
            row = decisions.tensor("context")
            moved: dict[str, Column] = {
                "episode": picked(torch.tensor(live), row),
                "turn": torch.full_like(row, turn),
                "context": row + first,
            }
            if sampling.temperatures() is not None and "temperature" not in decisions:
                moved["temperature"] = torch.ones(len(row))
            prompt = torch.tensor([numbers.setdefault(prompts[r], len(numbers)) for r in live])
            rounds.append((decisions.plus(moved), context.plus({"prompt": prompt})))
            first += len(live)
            said = [(i, turn, answer) for i, answer in enumerate(rollouts.completions())]
            replies = log.act_all(self.world, said)
            for r, reply in zip(live, replies, strict=True):
                prompts[r] = tuple(reply.observation)
            room = self.policy.context_length
            live = [
                r for r, reply in zip(live, replies, strict=True) if not reply.done and len(prompts[r]) < room
            ]
        return Table.cat([d for d, _ in rounds]), Table.cat([c for _, c in rounds]), log

    @staticmethod
    def _mask(plays: Sequence[Play], before: Sequence[Sequence[int]] = ()) -> BatchMask | None:
        """What plays allow, where they do not allow everything; `before` is what their turns have said already."""
        return of_plays(plays, before) if any(play.restricts for play in plays) else None

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        on_stop: OnStop | None = None,
        *,
        mask: BatchMask | None = None,
        entropy: bool = False,
    ) -> Rollouts:
        """Sample from who acts. `decode_steps` counts the tokens of the longest row, which the others wait for.

        An engine that lacks entropies is not asked for any, and the column is absent.
        """
        engine = self.engine
        entropy = entropy and "entropy" not in engine.lacks
        found = engine.generate(
            requests, sampling, on_stop, mask=mask, complete=self._complete, entropy=entropy
        )
        if found.decisions.rows:
            self.state["decode_steps"] += int(found.decisions.tensor("context").bincount().max())
        return found

    def count_signals(self, earned_: Sequence[Signals]) -> None:
        """Add up what turns have earned of the signal that a budget is counted by."""
        if self.counted is not None:
            more = sum(earned(signals.get(self.counted, 0.0)) for signals in earned_)
            self.state[f"signal:{self.counted}"] = self.state.get(f"signal:{self.counted}", 0) + round(more)

    def check_tokens_alone(self, what: str) -> None:
        """Refuse to go on from what was said before, where tokens do not tell what was read there."""
        if self.policy.thoughts is not None:
            raise PanoplyError(
                f"{what} goes on from tokens alone, and this policy has read vectors beside them that are not kept."
            )

    @cached_property
    def _complete(self) -> Complete | None:
        """The world's word on when a turn is complete, where it has one."""
        return None if type(self.world).complete is TextWorld.complete else self.world.complete

    def tree(self, tasks: Sequence[Task], temperature: float = 1.0) -> TextTree:
        """A tree of the policy's own episodes for each task, of which nothing has grown yet."""
        from panoply.rollout.text_tree import TextTree

        self.check_tokens_alone("A branch")
        return TextTree(self, tasks, temperature)

    def prefix_values(
        self,
        tasks: Sequence[Task],
        prefixes: Sequence[Sequence[int]],
        samples: int,
        temperature: Temperature = 1.0,
    ) -> Tensor:
        """V̂ of unfinished answers: the mean success of so many of the policy's own continuations of each.

        Of who acts at that temperature. Continuations that could not be graded are left out.
        """
        rollouts, success = self.continued(tasks, prefixes, samples, temperature)
        graded = ~success.isnan()
        worth = torch.stack([success.nan_to_num(), graded.float()], dim=1)
        found = torch.zeros(len(prefixes), 2).index_add(0, rollouts.request, worth)
        return found[:, 0] / found[:, 1].clamp(min=1)

    def continued(
        self,
        tasks: Sequence[Task],
        prefixes: Sequence[Sequence[int]],
        samples: int,
        temperature: Temperature = 1.0,
    ) -> tuple[Rollouts, Tensor]:
        """So many of the policy's own continuations of each unfinished answer, and whether they succeed.

        NaN where one could not be graded. For worlds of one turn. The draws count as decisions, and as neither
        episodes nor tasks.
        """
        self.check_tokens_alone("A continuation")
        sampling = self._sampling(temperature)
        starts = [(*task.prompt, *prefix) for task, prefix in zip(tasks, prefixes, strict=True)]
        named = (self.seed, self.version, self.state["episodes"])
        requests = [
            Request(
                start,
                [stable_hash("continue", *named, i, s) for s in range(samples)],
                begun=len(prefixes[i]),
            )
            for i, start in enumerate(starts)
        ]
        plays = [self.world.play(task) for task in tasks for _ in range(samples)]
        before = [prefix for prefix in prefixes for _ in range(samples)]
        rollouts = self.generate(requests, sampling, mask=self._mask(plays, before))
        self._count(rollouts.decisions)
        of = rollouts.request.tolist()
        answers = [[*prefixes[r], *rest] for r, rest in zip(of, rollouts.completions(), strict=True)]
        graded = self.world.grade_all([tasks[r] for r in of], answers)
        return rollouts, torch.tensor([g["success"] if g else torch.nan for g in graded])

    def _sampling(
        self,
        temperature: Temperature = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        max_tokens: int | None = None,
    ) -> Sampling:
        longest = self.world.max_tokens
        return Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k or None,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            max_tokens=min(max_tokens or longest, longest),
            stop_tokens=self.world.stop_tokens,
            stop_strings=self.world.stop,
            heat=self._heat,
        )

    # -------------------------------------------------------------- tables

    def _experience(
        self, tasks: Sequence[Task], groups: Sequence[int], decisions: Table, context: Table, log: Replies
    ) -> Experience:
        """Keys, signals and ends for the rows of played episodes, which are numbered 0… in the order of `tasks`."""
        key = decisions.tensor("episode") * 2**20 + decisions.tensor("turn")
        if bool((key[1:] < key[:-1]).any()):
            decisions = decisions.take(key.argsort(stable=True))
        row, turn = decisions.tensor("episode"), decisions.tensor("turn")
        self._count(decisions)
        self.count_signals([reply.signals for _, reply in log.replies.values()])
        episode = self._number(len(tasks))
        columns: dict[str, Column] = {
            **{name: picked(column, row) for name, column in self._of_tasks(tasks).items()},
            "group": picked(torch.tensor(groups), row),
            "episode": picked(episode, row),
            **({} if "version" in decisions else {"version": torch.full_like(row, self.version)}),
            "source": torch.full_like(row, OWN),
            **({"actor": torch.full_like(row, self.actor)} if self.selves and self.selves.actors else {}),
            **log.columns(row, turn, decisions.tensor("end")),
        }
        if "answer_likelihood" in self.needs:
            columns["answer_likelihood"] = answer_likelihood(
                self.world, self.policy, tasks, decisions, context
            )
        experience = Experience(decisions.plus(columns), context)
        return self._graded(experience, row, log.failed, len(tasks)) if log.failed else experience

    def _graded(self, experience: Experience, row: Tensor, failed: Sequence[int], played: int) -> Experience:
        """Without those that could not be graded: `failed` of so many that were `played`; `row` says which is whose."""
        graded = ~torch.isin(row, torch.tensor(failed))
        if self.split == "test":
            return experience.with_columns(graded=graded.float())
        if len(failed) == played:
            why = "; ".join(self.failures())
            raise Resumable(f"Not one of {played} answers could be graded: {why}.")
        return experience.take(graded)

    def _draw(self, episode: int) -> int:
        return stable_hash("draw", self.seed, self.split, episode)


def check_turns(turns: int | None) -> None:
    if turns is not None and turns < 1:
        raise PanoplyError(f"An episode has at least one turn, not {turns}.")


def publish(engine: Engine, policy: TextPolicy, version: int) -> None:
    """Give an engine a policy's weights, and see that they have arrived."""
    weights = moving(policy)
    if (found := engine.publish(weights, version)) != (sent := checksum(weights)):
        raise PanoplyError(
            f"The engine has other weights ({found}) than it was given ({sent}) at step {version}: it would sample "
            "from another policy than the one that learns."
        )


Played = tuple[Table, Table, Replies]
