"""Control on samplers: each holds a copy of the policy and plays whole fragments of its environments; no call a step.

An episode's number names its start and its noise. Where a fragment ends episodes, nobody can know who ended first
without asking at every step. So a call gives out numbers by place: of E rows, row r begins its k-th episode of the
call as number first + kE + r. That does not depend on how many samplers there are, nor on who died; and where
all rows end together, as in worlds of fixed length, it is the order in which one process counts. Whole episodes have
their numbers before they begin, and are those of one process to rounding.

Open episodes live where they run. The driver keeps what was done in them, and whoever is asked next for these rows
without having them plays them again up to there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.kinds import kind_of
from panoply.loops.metrics import peak_memory
from panoply.policies.moving import checksum, moving, take
from panoply.rollout.control import ControlCollector
from panoply.rollout.stepping import Array, Episode, StepBuffer, Temperature
from panoply.scale import travel
from panoply.scale.crew import Crew, Published
from panoply.scale.weights import Parcel, Stored, opened
from panoply.worlds.control.world import Start

if TYPE_CHECKING:
    from panoply.planning import Plan
    from panoply.policies.control import ControlPolicy
    from panoply.scale.spread import Spread

EXACT = 1024
"""Rows up to which a sampler computes as if it had all, so that not a bit differs; more are equal to rounding."""
Share = dict[str, Any]
Fact = list[int]
"""Of an episode: its number, its group, its start's number and seed; of an open one, how many turns were taken."""


# ------------------------------------------------------------------ where the environments are


class Player(ControlCollector):
    """A collector that is told which numbers its episodes have."""

    def fragment(self, share: Share) -> dict[str, Any]:
        """Some steps of some rows, which go on where the driver says that they were left."""
        rows, buffer = self._taken_up(share), StepBuffer(share["rows"], share["length"])
        rows._forward = in_place(rows._forward, share["first"], share["all"])
        begun = np.full(share["rows"], int(share["open"] is None))
        for _ in range(share["length"]):
            ended = rows.step(buffer, share["temperature"], blind=buffer.length < share["blind"])
            if ended is not None:
                rows.begin(ended, [self._episode(share, row, begun) for row in ended.tolist()])
        seen = [_fact(episode) for episode in rows.seen]
        rows.remember(buffer)
        kept, actions = rows.record()
        rows.at = kept
        return {
            "columns": {name: buffer.column(name) for name in buffer.names()},
            "seen": seen,
            "open": kept,
            "actions": actions.numpy(),
            "begun": int(begun.max()),
        }

    def _taken_up(self, share: Share) -> Any:
        kept, rows, size = share["open"], self._open, share["rows"]
        if rows is not None and kept is not None and rows.at == kept and rows.envs.size == size:
            rows.refresh()
            return rows
        if rows is not None:
            rows.envs.close()
        self._open = rows = self._rows(size)
        if kept is None:
            none = np.zeros(size, dtype=int)
            rows.begin(np.arange(size), [self._episode(share, row, none) for row in range(size)])
        else:
            lengths = [length for *_, length in kept]
            rows.replay([_episode(fact) for fact in kept], lengths, share["actions"])
        return rows

    def _episode(self, share: Share, row: int, begun: Array) -> Episode:
        """The next episode of a row, by its place."""
        seats, place = self.world.seats, share["first"] + row
        wave = int(begun[row])
        begun[row] += 1
        first = share["numbers"]
        task = self.task(self.place(first["tasks"] + wave * (share["all"] // seats) + place // seats))
        at = wave * share["all"] + place
        return Episode(first["episodes"] + at, first["groups"] + at, task)

    def whole(self, share: Share) -> dict[str, Any]:
        """Episodes from their beginning to their end."""
        waiting = [_episode(fact) for fact in share["episodes"]]
        buffer, _ = self._played(waiting, share["temperature"], share["limit"])
        return {"columns": buffer.kept()}


def in_place(forward: Any, first: int, rows: int) -> Any:
    """What acts, as it is among all rows: a product of matrices rounds a row by its place and by how many there are."""
    if rows > EXACT:
        return forward

    def placed(seen: Array, turn: Array) -> Array:
        at = slice(first, first + len(seen))
        all_seen = np.zeros((rows, *seen.shape[1:]), dtype=seen.dtype)
        all_turns = np.zeros(rows, dtype=turn.dtype)
        all_seen[at], all_turns[at] = seen, turn
        found: Array = forward(all_seen, all_turns)[at]
        return found

    return placed


class ControlSampler:
    """The worker: world, policy and environments."""

    def __init__(self, parcel: Mapping[str, Any], source: str = ""):
        plan = travel.unpacked(parcel)
        world: Any = plan.world()
        options = dataclasses.replace(plan.options, device="cpu")
        try:
            policy = kind_of(world).open_policy(options.model, world, options, plan.policy_options)
        except PanoplyError:
            if not source:
                raise
            policy = kind_of(world).open_policy(source, world, options, plan.policy_options)
        self.player = Player(world, policy, plan.options.seed, needs=plan.method.needs())  # type: ignore[arg-type]

    def take(self, who: str, version: int, parcel: Parcel, content: Any = None) -> str:
        """Act with these weights from now on."""
        take(self.player.policy.model, opened(parcel, content))
        return checksum(moving(self.player.policy))

    def fragment(self, share: Share) -> dict[str, Any]:
        return self._timed(self.player.fragment, share)

    def whole(self, share: Share) -> dict[str, Any]:
        return self._timed(self.player.whole, share)

    def _timed(self, play: Any, share: Share) -> dict[str, Any]:
        began = time.perf_counter()
        found: dict[str, Any] = play(share)
        tokens = int(found["columns"]["live"].sum())
        why = self.player.failures()
        return {
            **found,
            "why": why,
            "busy": time.perf_counter() - began,
            "tokens": tokens,
            "memory_mb": peak_memory(),
        }


def _fact(episode: Episode) -> Fact:
    return [episode.number, episode.group, episode.task.id, episode.task.seed]


def _episode(fact: Sequence[int]) -> Episode:
    return Episode(fact[0], fact[1], Start(fact[2], fact[3]))


# ------------------------------------------------------------------ the driver


class Fragments(ControlCollector):
    """A collector of control whose environments are on samplers."""

    def __init__(
        self,
        world: Any,
        policy: ControlPolicy,
        seed: int,
        split: str = "train",
        needs: frozenset[str] = frozenset(),
        *,
        plan: Plan,
        spread: Spread,
        source: str = "",
    ):
        super().__init__(world, policy, seed, split, needs)
        self.own, options = policy, plan.options
        cluster, parcel = spread.cluster, travel.packed(plan)
        self.crew: Crew[Share] = Crew(
            cluster,
            options.samplers,
            lambda n: cluster.place("sampler", n, ControlSampler, parcel, source),
            Stored(cluster.put),
            options.patience,
            lambda share: [share],
            lambda share: float(share["rows"]),
        )
        self._published: Published | None = None
        self._failed: dict[str, int] = {}
        self._told = time.perf_counter()

    def _here(self, temperature: Temperature) -> bool:
        """Whether the driver plays itself: other selves act, or temperatures are a function."""
        return callable(temperature) or self.policy is not self.own or bool(self._others)

    def _acting(self) -> Published:
        weights = moving(self.own)
        now = (self.version, checksum(weights))
        known = self._published
        if known is None or (known.version, known.checksum) != now:
            known = self._published = self.crew.published("learner", *now, weights)
        return known

    def _ask(self, method: str, shares: list[Share]) -> list[dict[str, Any]]:
        found = [answer for _, answer in self.crew.asked(method, shares, self._acting())]
        for why, times in (item for answer in found for item in answer["why"].items()):
            self._failed[why] = max(times, self._failed.get(why, 0))
        return found

    def failures(self) -> dict[str, int]:
        return {**super().failures(), **self._failed}

    def workers(self, step: int) -> list[dict[str, Any]]:
        """What each sampler did since this was asked last."""
        now = time.perf_counter()
        took, self._told = now - self._told, now
        return self.crew.workers(step, took)

    def close(self) -> None:
        self.crew.close()
        super().close()

    # -------------------------------------------------------------- fragments

    def rollout(self, envs: int, length: int, temperature: Temperature = 1.0, random: int = 0) -> Experience:
        if self._here(temperature):
            return super().rollout(envs, length, temperature, random)
        return Fragment(self, envs, length, temperature, random).experience(likelihoods=True)

    def steps(self, envs: int, length: int, temperature: Temperature = 1.0, random: int = 0) -> Any:
        if self._here(temperature):
            return super().steps(envs, length, temperature, random)
        return Fragment(self, envs, length, temperature, random)

    def played(self, rows: int, length: int, temperature: Temperature, blind: int) -> dict[str, Any]:
        """A fragment of all rows, each sampler some of them; counters go on."""
        kept = self.state.get("open")
        kept = kept if kept is not None and len(kept) == rows else None
        numbers = {name: self.state[name] for name in ("tasks", "groups", "episodes")}
        ends = np.cumsum([0, *(fact[-1] for fact in kept or ())])
        shares = []
        for some in np.array_split(np.arange(rows // self.world.seats), self.crew.n):
            first, size = int(some[0]) * self.world.seats if len(some) else 0, len(some) * self.world.seats
            if size:
                actions = self.state["actions"].numpy()[ends[first] : ends[first + size]] if kept else None
                shares.append(
                    {
                        "first": first,
                        "rows": size,
                        "all": rows,
                        "length": length,
                        "temperature": temperature,
                        "blind": blind,
                        "numbers": numbers,
                        "open": kept[first : first + size] if kept else None,
                        "actions": actions,
                    }
                )
        answers = self._ask("fragment", shares)
        waves = max(answer["begun"] for answer in answers)
        seen = [fact for answer in answers for fact in answer["seen"]]
        new = sum(fact[0] >= numbers["episodes"] for fact in seen)
        self.state["tasks"] += waves * (rows // self.world.seats)
        self.state["groups"] += waves * rows
        self.state["episodes"] += waves * rows
        self.state["skipped"] = self.state.get("skipped", 0) + waves * rows - new
        self.state["open"] = [fact for answer in answers for fact in answer["open"]]
        self.state["actions"] = torch.from_numpy(np.concatenate([answer["actions"] for answer in answers]))
        names = answers[0]["columns"]
        columns = {name: np.concatenate([a["columns"][name] for a in answers], axis=1) for name in names}
        return {"columns": columns, "seen": [_episode(fact) for fact in seen]}

    # -------------------------------------------------------------- whole episodes

    def _played(
        self, waiting: Sequence[Episode], temperature: Temperature, limit: int | None
    ) -> tuple[StepBuffer, Any]:
        """Episodes of all games, each sampler some; rows are put in order by whoever makes a table of them."""
        if self._here(temperature) or not waiting:
            return super()._played(waiting, temperature, limit)
        games, seats = np.arange(len(waiting) // self.world.seats), self.world.seats
        shares = [
            {
                "first": int(some[0]),
                "rows": len(some) * seats,
                "episodes": [_fact(e) for e in waiting[some[0] * seats : (some[-1] + 1) * seats]],
                "temperature": temperature,
                "limit": limit,
            }
            for some in np.array_split(games, self.crew.n)
            if len(some)
        ]
        found = [answer["columns"] for answer in self._ask("whole", shares)]
        columns = {name: np.concatenate([one[name] for one in found])[:, None] for name in found[0]}
        buffer = StepBuffer.of(columns)
        return buffer, SimpleNamespace(seen=list(waiting), head=self.policy.model.on_host()[1])


class Fragment:
    """A fragment that was played, to be gone through a step at a time by those who learn in between.

    It was played with the weights of its beginning. In one process whoever acts learns between steps, so the two are
    the same where a fragment has one step, or nothing is learned on the way.
    """

    def __init__(self, collector: Fragments, envs: int, length: int, temperature: Temperature, random: int):
        rows = envs * collector.world.seats
        blind = -(-(random - collector.state["decisions"]) // rows)
        found = collector.played(rows, length, temperature, blind)
        self._collector, self._temperature, self._seen = collector, temperature, found["seen"]
        self._buffer = StepBuffer.of(found["columns"])
        self._length = length

    def __iter__(self) -> Iterator[StepBuffer]:
        for step in range(1, self._length + 1):
            self._buffer.length = step
            yield self._buffer

    def experience(self, likelihoods: bool = False) -> Experience:
        collector = self._collector
        rows: Any = SimpleNamespace(seen=self._seen, head=collector.policy.model.on_host()[1])
        return collector._experience(self._buffer, rows, self._temperature if likelihoods else None)
