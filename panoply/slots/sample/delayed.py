"""Episodes that are under way while the policy learns: asynchronous sampling, in simulated time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from panoply.episodes import as_tensors, from_tensors
from panoply.experience import OWN, REPLAY, Experience
from panoply.parts import Finding, part
from panoply.seeds import numpy_rng
from panoply.slots.sample.groups import LIMITS

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

DELAYED = "delayed"
"""What a sample part gives whose rows may be of earlier selves, with the `logp` they were drawn with."""


@dataclass
class Queue:
    """What is under way, in simulated time. A batch is taken when enough is finished, and nobody waits for the rest.

    Something new begins while fewer than `most` are running and fewer than (η + version + 1)·batch have ever begun (the
    rule of AReaL, arXiv 2505.24298): so at most η batches are ahead of the learner, and with η = 0 every batch is begun
    when the one before has been learned from.
    """

    clock: float = 0.0
    begun: int = 0
    waiting: list[list[float]] = field(default_factory=list)
    """Of everything that was begun and not taken: its number and when it is finished."""

    def free(self, batch: int, ahead: int, version: int, most: int | None) -> int:
        running = sum(1 for _, end in self.waiting if end > self.clock)
        room = math.inf if most is None else most - running
        return int(max(0, min(room, (ahead + version + 1) * batch - self.begun)))

    def take(
        self,
        batch: int,
        ahead: int,
        version: int,
        most: int | None,
        begin: Callable[[int], Sequence[tuple[int, float]]],
    ) -> list[int]:
        """The numbers of the next batch: the first that are finished. `begin(n)` gives numbers and durations."""
        while True:
            if (n := self.free(batch, ahead, version, most)) > 0:
                self.waiting += [[number, self.clock + lasts] for number, lasts in begin(n)]
                self.begun += n
            done = sorted((w for w in self.waiting if w[1] <= self.clock), key=lambda w: (w[1], w[0]))
            if len(done) >= batch:
                self.waiting = [w for w in self.waiting if w not in done[:batch]]
                return [int(number) for number, _ in done[:batch]]
            self.clock = min(end for _, end in self.waiting if end > self.clock)


def durations(lengths: Sequence[float], tail: float, *name: object) -> list[float]:
    """How long each takes: its length times e^(tail·N(0, 1)), by chance that depends on the name alone."""
    factors = numpy_rng("duration", *name).standard_normal(len(lengths))
    return [float(length * math.exp(tail * z)) for length, z in zip(lengths, factors, strict=True)]


def _first() -> dict[str, Any]:
    return {"clock": 0.0, "begun": 0, "waiting": []}


def _inert(held: Any, method: Any) -> list[Finding]:
    if held.versions:
        return []
    why = "with versions=0 every batch is waited for, whatever takes how long"
    return [("tail", why), ("running", why)]


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} prompts × {held.group} episodes, the first finished of those begun at most {held.versions} "
        "batches ahead"
    ),
    needs={"world:text"},
    gives={DELAYED},
    state=_first,
    inert=_inert,
    bounds={
        **{name: LIMITS[name] for name in ("prompts", "group", "temperature")},
        "versions": "from 0 to 1000",
        "tail": "from 0 to 10",
        "running": "at least 1",
    },
)
def delayed(
    state: dict[str, Any],
    collect: Collector,
    *,
    prompts: int = 128,
    group: int = 16,
    temperature: float = 1.0,
    versions: int = 4,
    tail: float = 1.0,
    running: int | None = None,
) -> tuple[dict[str, Any], Experience]:
    """Groups as an asynchronous sampler delivers them: begun under earlier weights, learned from when they are done.

    Time is simulated: a group takes as long as its longest episode has decisions, times a factor of chance with a heavy
    tail. Its episodes are drawn when it begins, by the policy of that step, with that policy's `logp` and `version`;
    what waits is part of a checkpoint. Reports `staleness`, the mean number of steps since, and `clock`.

    versions   η: how many batches may be begun ahead of the learner; 0 is synchronous
    tail       spread of that factor, e^(tail·N(0, 1))
    running    groups under way at once, at most; none means any number
    """
    queue = Queue(state["clock"], state["begun"], [list(w) for w in state["waiting"]])
    kept = {name: t for name, t in state.items() if name not in _first()}
    held = [from_tensors(kept)] if kept else []

    def begin(n: int) -> list[tuple[int, float]]:
        fresh = collect.episodes(collect.tasks(n), group, temperature=temperature)
        held.append(fresh)
        groups, episodes = fresh.by("group"), fresh.by("episode")
        of = episodes.first(groups.index)
        longest = torch.zeros(len(groups), dtype=episodes.count.dtype).scatter_reduce(
            0, of, episodes.count, "amax"
        )
        lasts = durations(longest.tolist(), tail, collect.seed, int(groups.keys[0]))
        return list(zip(groups.keys.tolist(), lasts, strict=True))

    taken = torch.tensor(queue.take(prompts, versions, collect.version, running, begin))
    every = Experience.mix(held)
    mine = torch.isin(every["group"], taken)
    batch = every.take(mine)
    old = batch["version"] < collect.version
    batch = batch.with_columns(source=torch.where(old & (batch["source"] == OWN), REPLAY, batch["source"]))
    stale = float((collect.version - batch["version"]).float().mean())
    collect.notes = {**collect.notes, "staleness": stale, "clock": queue.clock}
    rest = every.take(~mine)
    known = {"clock": queue.clock, "begun": queue.begun, "waiting": queue.waiting}
    return {**known, **(as_tensors(rest) if len(rest) else {})}, batch
