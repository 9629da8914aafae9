"""From a control world to experience: starts in, steps out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import OPEN, OWN, TERMINATED, TRUNCATED, Column, Experience, Table
from panoply.policies.control import ControlPolicy
from panoply.policies.heads import Head
from panoply.rollout.collector import InOrder
from panoply.rollout.games import folded, keys
from panoply.rollout.stepping import BLOCK, Array, Episode, Rows, StepBuffer, Temperature
from panoply.worlds.control.world import ControlWorld, Envs, Start

if TYPE_CHECKING:
    from panoply.rollout.control_tree import ControlTree

MOST = 256
"""Environments stepped side by side where whole episodes are asked for."""


class ControlCollector(InOrder[Start]):
    """Lets a policy act, for whole episodes or for a fixed number of steps that leave episodes open.

    An action's noise depends on seed, episode and turn alone, never on how many environments run side by side. What
    must be remembered is `state`: counters, and for open episodes their number and what was done in them; a resumed
    run plays them again up to where they were.
    """

    def __init__(
        self,
        world: ControlWorld,
        policy: ControlPolicy,
        seed: int,
        split: str = "train",
        needs: frozenset[str] = frozenset(),
    ):
        self.world, self.seed, self.split = world, seed, split
        self.policy: ControlPolicy = policy
        self.needs = needs
        self.state: dict[str, Any] = {"tasks": 0, "groups": 0, "episodes": 0, "decisions": 0}
        self.version = 0
        self._logged: Experience | None = None
        self._others: Mapping[int, ControlPolicy] = {}
        self._open: Rows | None = None
        self._batches: dict[int, Envs] = {}

    # -------------------------------------------------------------- what a sample part asks for

    def episodes(
        self,
        tasks: Sequence[Start],
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
    ) -> Experience:
        """A group of whole episodes from each start; `max_tokens` decisions at most.

        group   how many episodes, or games: one number for all starts, or one for each
        into    keys of groups that the episodes join, one a start and seat; left out, each of these has a new group
        """
        penalised = repetition_penalty != 1.0 or presence_penalty or frequency_penalty
        if top_p != 1.0 or top_k or min_p or penalised:
            raise PanoplyError(
                "top_p, top_k, min_p and penalties act on a vocabulary; a control policy has none."
            )
        return self._experience(
            *self._played(self._games(tasks, group, into), temperature, max_tokens), temperature
        )

    def _played(
        self, waiting: Sequence[Episode], temperature: Temperature, limit: int | None
    ) -> tuple[StepBuffer, Rows]:
        """Episodes from their beginning to their end, or to a limit of turns, as many side by side as there is room."""
        size = min(len(waiting), MOST - MOST % self.world.seats)
        rows = Rows(self, self._envs(size))
        queue = iter(waiting)
        rows.begin(np.arange(size), [next(queue) for _ in range(size)])
        buffer = StepBuffer(size, BLOCK)
        while rows.live.any():
            ended = rows.step(buffer, temperature, limit)
            if ended is not None:
                coming = [(row, episode) for row, episode in zip(ended.tolist(), queue, strict=False)]
                rows.begin(np.array([row for row, _ in coming], dtype=int), [e for _, e in coming])
        return buffer, rows

    @contextmanager
    def against(self, others: Mapping[int, ControlPolicy]) -> Iterator[None]:
        """Let others of the same form play some seats of games for a while, by number. Their rows are there, too."""
        before, self._others = self._others, others
        try:
            yield
        finally:
            self._others = before

    def _games(
        self, tasks: Sequence[Start], group: int | Sequence[int], into: Tensor | None
    ) -> list[Episode]:
        """The episodes of all seats of a game, then those of the next; a start has a group for each of its seats."""
        seats, first = self.world.seats, self.state["episodes"]
        sizes = group if isinstance(group, int) else [n for n in group for _ in range(seats)]
        asked = iter(zip(*self._groups([t for t in tasks for _ in range(seats)], sizes, into), strict=True))
        times = [group] * len(tasks) if isinstance(group, int) else group
        made: list[Episode] = []
        for n in times:
            of_seats = [[next(asked) for _ in range(n)] for _ in range(seats)]
            for task, key in (pair for game in zip(*of_seats, strict=True) for pair in game):
                made.append(Episode(first + len(made), key, task))
        self.state["episodes"] += len(made)
        return made

    def rollout(self, envs: int, length: int, temperature: Temperature = 1.0, random: int = 0) -> Experience:
        """`length` steps of `envs` environments. Episodes go on where the last call left them.

        random   steps since the run began in which any action is taken
        """
        acting = self.steps(envs, length, temperature, random)
        for _ in range(length):
            acting.step()
        return acting.experience(likelihoods=True)

    def steps(self, envs: int, length: int, temperature: Temperature = 1.0, random: int = 0) -> Acting:
        """The same a step at a time, for those who learn in between."""
        return Acting(self, envs, length, temperature, random)

    def tree(self, starts: Sequence[Start], temperature: float = 1.0) -> ControlTree:
        """A tree of episodes from each start, of which nothing has grown yet."""
        from panoply.rollout.control_tree import ControlTree

        return ControlTree(self, starts, temperature)

    def logged(self) -> Experience:
        """All of the world's logged data."""
        if self._logged is None:
            data: Any = self.world.data
            self._logged = data.experience()
        return self._logged

    def _next_episodes(self, rows: int) -> list[Episode]:
        """Of the next starts, one for all seats of a game."""
        return [
            episode
            for task in self.tasks(rows // self.world.seats)
            for episode in self._games([task], 1, None)
        ]

    def _continued(self, envs: int) -> Rows:
        """The open episodes; after a resumption they are played again, at first they are begun."""
        rows, kept, size = self._open, self.state.get("open"), envs * self.world.seats
        if rows is not None and rows.at is kept and rows.envs.size == size:
            rows.refresh()
            return rows
        self._open = rows = self._rows(size)
        if kept is None or len(kept) != size:
            rows.begin(np.arange(size), self._next_episodes(size))
        else:
            episodes = [Episode(e, g, Start(task, seed)) for e, g, task, seed, _ in kept]
            rows.replay(episodes, [length for *_, length in kept], self.state["actions"].numpy())
        return rows

    def _rows(self, size: int) -> Rows:
        return Rows(self, self.world.envs(size))

    def _envs(self, size: int) -> Envs:
        if size not in self._batches:
            self._batches[size] = self.world.envs(size)
        return self._batches[size]

    def failures(self) -> dict[str, int]:
        """What went wrong inside environments, and how often."""
        found: dict[str, int] = {}
        batches = [*self._batches.values(), *([self._open.envs] if self._open else [])]
        for why, times in (item for envs in batches for item in envs.failures().items()):
            found[why] = found.get(why, 0) + times
        return found

    def close(self) -> None:
        for envs in (*self._batches.values(), *([self._open.envs] if self._open else [])):
            envs.close()
        self._batches, self._open = {}, None

    # -------------------------------------------------------------- tables

    def _experience(self, buffer: StepBuffer, rows: Rows, temperature: Temperature | None) -> Experience:
        """Rows in the order of their episodes and, inside one, of time; final observations come last.

        Without a temperature it is not asked how likely actions were.
        """
        taken = buffer.kept()
        episode = taken["episode"]
        order = episode.argsort(kind="stable")
        taken = {name: column[order] for name, column in taken.items()}
        if "acting" in taken:
            taken = folded(taken)
        episode, n = taken["episode"], len(taken["episode"])
        last = np.append(episode[1:] != episode[:-1], True)
        ends = last.nonzero()[0]
        after = np.arange(1, n + 1)
        after[ends] = n + np.arange(len(ends))
        facts = {e.number: e for e in rows.seen}
        known = [facts[number] for number in episode[ends].tolist()]
        count = np.diff(ends, prepend=-1)
        columns: dict[str, Column] = {
            "task": torch.from_numpy(np.repeat([e.task.id for e in known], count)),
            "group": torch.from_numpy(np.repeat([e.group for e in known], count)),
            "episode": torch.from_numpy(episode),
            "turn": torch.from_numpy(taken["turn"]),
            "version": torch.full((n,), self.version),
            "context": torch.arange(n),
            "next": torch.from_numpy(after),
            "action": torch.from_numpy(taken["action"]),
            "source": torch.full((n,), OWN),
            **({"actor": torch.full((n,), self.actor)} if self.selves and self.selves.actors else {}),
            "end": torch.from_numpy(
                np.where(taken["terminated"], TERMINATED, np.where(taken["truncated"], TRUNCATED, OPEN))
            ),
            "signal:reward": torch.from_numpy(taken["reward"].astype(np.float32)),
            "earned": torch.from_numpy(taken["earned"].astype(np.float32)),
        }
        for name in taken:
            if name.startswith("signal:"):
                columns[name] = torch.from_numpy(taken[name].astype(np.float32))
        if self.world.seats > 1:
            found = keys(episode, taken["turn"], self.world.seats)
            columns |= {name: torch.from_numpy(column) for name, column in found.items()}
        context: dict[str, Column] = {"observation": _joined(taken["observation"], taken["after"][ends])}
        if "joint" in taken:
            context["joint"] = _joined(taken["joint"], taken["joint_after"][ends])
        if "legal" in taken:
            context["legal"] = _joined(taken["legal"], taken["legal_after"][ends])
        columns["state"] = hashed(taken["observation"])
        self.state["decisions"] = self.state.get("decisions", 0) + n
        if temperature is not None:
            sampled_at = _recorded(temperature, columns["turn"])  # type: ignore[arg-type]
            if sampled_at is not None:
                columns["temperature"] = sampled_at
            columns |= _drawn(rows.head, taken, columns, sampled_at)
        return Experience(Table(columns), Table(context))


class Acting:
    """Steps to be taken: one at every turn of a loop, in which one may learn; `experience` is all of them.

    for buffer in collect.steps(envs=8, length=100):   # what was written so far, this step last
        …
    """

    def __init__(
        self, collector: ControlCollector, envs: int, length: int, temperature: Temperature, random: int
    ):
        self._collector, self._temperature, self._length = collector, temperature, length
        self._rows = collector._continued(envs)
        size = self._rows.envs.size
        self._buffer = StepBuffer(size, length)
        self._blind = -(-(random - collector.state["decisions"]) // size)

    def __iter__(self) -> Iterator[StepBuffer]:
        for _ in range(self._length):
            self.step()
            yield self._buffer
            if self._collector.policy.device.type != "cpu":
                self._rows.refresh()  # what acts is a copy

    def step(self) -> None:
        """Act once in every environment; where an episode ends the next begins."""
        if self._rows.envs.acting is not None:
            name = self._collector.world.name
            raise PanoplyError(
                f"Games of {name} are played to their end: a decision is paid after others' moves."
            )
        blind = self._buffer.length < self._blind
        ended = self._rows.step(self._buffer, self._temperature, blind=blind)
        if ended is not None:
            self._rows.begin(ended, self._collector._next_episodes(len(ended)))

    def experience(self, likelihoods: bool = False) -> Experience:
        """What was done, after the last step; `likelihoods`: and how likely that was."""
        collector, rows = self._collector, self._rows
        made = collector._experience(self._buffer, rows, self._temperature if likelihoods else None)
        rows.remember(self._buffer)
        collector.state["open"], collector.state["actions"] = rows.record()
        rows.at = collector.state["open"]
        return made


def _joined(rows: Array, finals: Array) -> Tensor:
    return torch.from_numpy(np.concatenate([rows, finals]))


def _recorded(temperature: Temperature, turn: Tensor) -> Tensor | None:
    """The column `temperature`; a greedy decision is recorded under temperature 1."""
    if callable(temperature):
        sampled_at = temperature(turn).float()
    elif temperature in (0.0, 1.0):
        return None
    else:
        sampled_at = torch.full((len(turn),), float(temperature))
    return sampled_at.masked_fill(sampled_at == 0, 1.0)


def hashed(observations: Array) -> Tensor:
    """A number for each observation, equal where they are equal to the last bit."""
    flat = np.ascontiguousarray(observations.reshape(len(observations), -1))
    words = flat.view(f"u{min(8, flat.dtype.itemsize)}").astype(np.uint64)
    odd = np.random.default_rng(0).integers(2**63, size=words.shape[1], dtype=np.uint64) * 2 + 1
    with np.errstate(over="ignore"):
        mixed = ((words + np.uint64(1)) * odd).sum(1, dtype=np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    return torch.from_numpy((mixed >> np.uint64(1)).astype(np.int64))


@torch.no_grad()
def _drawn(
    head: Head, taken: Mapping[str, Array], columns: Mapping[str, Column], sampled_at: Tensor | None
) -> dict[str, Column]:
    """Log-probability and entropy of all actions at once, from the very outputs they were drawn from."""
    legal = torch.from_numpy(taken["legal"]) if "legal" in taken else None
    action = columns["action"]
    assert isinstance(action, Tensor)
    return dict(head.score(torch.from_numpy(taken["out"]), action, legal, sampled_at, entropy=True))
