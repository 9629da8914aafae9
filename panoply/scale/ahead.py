"""Sampling ahead: the batch of step t is sampled with the weights of step t − k, while earlier ones are learned from.

Which batch has which tasks is fixed: step t learns from those that one process would have given it, nothing is dropped
for its age, and no fast group overtakes a slow one. At most k + 1 batches are admitted: that which is learned from, and
k that are sampled, one after another. So the lag is a constant, and a run repeats bit for bit.

Batches are sampled on a thread of the driver, by a second collector with a world and a copy of the policy of its own:
whatever a sample part does beside asking samplers is done with the weights of the batch, too. What is remembered
between batches is handed to the seat with the batch, so that a checkpoint holds what was true before those in flight;
the weights that they are sampled with are saved with it, and a resumed run samples them anew, bit for bit.

With `inflight` samplers take the newest weights in the midst of answers; each decision then has its own `version`, at
most k steps old, and nothing repeats but the distribution.
"""

from __future__ import annotations

import copy
import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from panoply import selves
from panoply.errors import PanoplyError
from panoply.experience import OWN, Experience
from panoply.kinds import is_text
from panoply.parts import Part
from panoply.policies.moving import Weights, moving, take
from panoply.scale.fleet import Fleet
from panoply.scale.weights import Files
from panoply.slots.schedule.schedules import in_step, scheduled
from panoply.states import handed_back
from panoply.threads import without_denormals

if TYPE_CHECKING:
    from panoply.loops.seat import Seat
    from panoply.planning import Plan

PREFIX = "ahead:"
"""Of the names under which a run saves the weights of batches in flight."""
SAMPLE = "sample"
DRAWN = ("decisions", "decode_steps")
"""What a collector counts of all that is drawn, for whatever it is drawn."""


def check(plan: Plan) -> None:
    """Refuse to sample ahead what depends on what has not been learned yet."""
    if not plan.options.staleness:
        return
    if plan.seats():
        raise PanoplyError(
            "--staleness needs one learner: seats of a game are dealt what all of them just did."
        )
    if plan.method.regime != "on_policy" or not is_text(plan.world()):
        raise PanoplyError(
            f"--staleness is for on-policy text, which {plan.method_id} on {plan.world_id} is not."
        )
    held = cast(Part, plan.method.slots()[SAMPLE])
    needs = held.needs()
    if others := [*selves.actors(needs), *(["members"] if "members" in needs else [])]:
        raise PanoplyError(
            f"--staleness cannot be {plan.options.staleness}: sample ({held.info.name}) lets {others[0]} act, which "
            "changes while batches are sampled ahead."
        )
    if asked := sorted(need for need in needs if need.startswith("model:")):
        raise PanoplyError(
            f"--staleness cannot be {plan.options.staleness}: sample ({held.info.name}) asks {asked[0][6:]}, which "
            "learns while batches are sampled ahead."
        )


@dataclass(frozen=True)
class Batch:
    """What was sampled for a step, and what is remembered after it."""

    found: Experience
    collector: dict[str, Any]
    part: Any
    notes: Mapping[str, float]


class Ahead:
    """Of one seat. `batch` gives that of a step, and lets the one k steps later begin."""

    def __init__(self, seat: Seat, fleet: Fleet, lag: int, steps: int, board: Files | None = None):
        self.seat, self.fleet, self.lag, self.steps = seat, fleet, lag, steps
        self.held = cast(Part, seat.method.slots()[SAMPLE])
        self.flight: deque[tuple[int, Future[Batch]]] = deque()
        """Batches that were begun and not taken: the version of their weights, and what becomes of them."""
        self.weights: dict[int, Weights] = {}
        """Of every version that a batch in flight is sampled with."""
        self.own: Fleet | None = None
        self.board = board
        """Where samplers look for newer weights in the midst of answers."""
        self._memory: Any = None
        self._next = 0
        self._here: Counter[str] = Counter()
        """What was drawn on the seat itself since the start, and not for a batch: utterances for a critic, say."""
        self._told: dict[str, Any] = {}
        """What the seat's collector had counted when the last batch was taken."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ahead")

    # -------------------------------------------------------------- taking

    def batch(self, step: int, collect: Any = None) -> Experience:
        """The batch of a step, in place of what the sample part would make of `collect` now.

        What is remembered on the seat is then what was true after it was sampled."""
        now = self._now(step)
        if not self.flight:
            self._start(step)
        if self.board is not None:
            self.board.parcel(now, step)
        self.weights[step] = now
        self._admit(step)
        began = time.perf_counter()
        _, promised = self.flight.popleft()
        batch = promised.result()
        waited = time.perf_counter() - began
        self.weights = {v: w for v, w in self.weights.items() if any(v == other for other, _ in self.flight)}
        seat, found = self.seat, batch.found
        seat.collect.state = self._counted(batch.collector)
        if self.held.info.state is not None:
            seat.states[SAMPLE] = batch.part
        seat.collect.notes = {**batch.notes, **lags(found, step), "seconds_wait": round(waited, 4)}
        return found

    def _now(self, step: int) -> Weights:
        return {name: weight.cpu().clone() for name, weight in moving(self.seat.policy).items()}

    def _counted(self, after: dict[str, Any]) -> dict[str, Any]:
        """What a collector had counted `after` a batch was sampled, and what was drawn on the seat itself."""
        found, now = copy.deepcopy(after), self.seat.collect.state
        for name in DRAWN:
            self._here[name] += now[name] - self._told[name]
            found[name] += self._here[name]
        self._told = dict(found)
        return found

    def _start(self, step: int) -> None:
        """Begin anew, at the start of a run or after a checkpoint: those before step + k have older weights."""
        self._here, self._told = Counter(), dict(self.fleet.state)
        self.own = self._shadow()
        self._memory = copy.deepcopy(self.seat.states.get(SAMPLE))
        self._next = step
        if not self.weights:
            self.weights = {max(0, step - self.lag): self._now(step)} if step == 0 else self.weights
        for number in range(step, min(step + self.lag, self.steps)):
            version = max(0, number - self.lag)
            if version not in self.weights:
                raise PanoplyError(
                    f"The checkpoint has no weights of step {version}, with which the batch of step {number} is to be "
                    "sampled: it was made with another --staleness. Start a new run from its model."
                )
            self._begin(number, version)

    def _admit(self, step: int) -> None:
        """The one batch more that there is now room for."""
        if step + self.lag < self.steps:
            self._begin(step + self.lag, step)

    def _begin(self, number: int, version: int) -> None:
        self.flight.append((version, self._thread.submit(self._sampled, number, version)))

    # -------------------------------------------------------------- on the thread

    def _shadow(self) -> Fleet:
        """The collector that batches are sampled with: samplers are shared, world and policy its own."""
        fleet = self.fleet
        world: Any = self.seat.plan.world()
        made = fleet.beside(world, fleet.policy.copy())
        made.state = copy.deepcopy(fleet.state)
        made.board = None if self.board is None else str(self.board.folder)
        return made

    def _sampled(self, step: int, version: int) -> Batch:
        assert self.own is not None
        collect, held = self.own, self.held
        with without_denormals(), torch.no_grad():
            if self.board is not None:  # the newest that is there; samplers will look again
                version = max(self.weights)
            take(collect.policy.model, self.weights[version])
            collect.version = version
            called = in_step(held, step, self.steps) if scheduled(held) else held.filled
            if held.info.state is None:
                found = called(collect)
            else:
                self._memory, found = handed_back(held.info.id, called(self._memory, collect))
        notes, collect.notes = collect.notes, {}
        return Batch(found, copy.deepcopy(collect.state), copy.deepcopy(self._memory), notes)

    # -------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        """The weights of batches in flight, by version and name."""
        flying = {version for version, _ in self.flight}
        return {f"{PREFIX}{v}:{n}": w for v in flying for n, w in self.weights[v].items()}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        self.flight.clear()
        self.weights = {}
        for key, weight in named.items():
            if key.startswith(PREFIX):
                version, _, name = key.removeprefix(PREFIX).partition(":")
                self.weights.setdefault(int(version), {})[name] = weight.clone()  # type: ignore[index]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self.own is not None:
            self.own.world.close()
        if self.board is not None:
            self.board.close()


def lags(found: Experience, step: int) -> dict[str, float]:
    """How many steps older than the learner who acted was: the mean, the most, and the share of each."""
    lag = step - found["version"][found["source"] == OWN]
    if not len(lag):
        return {}
    share = lag.bincount().double() / len(lag)
    named = {f"lag_{i}": round(float(s), 6) for i, s in enumerate(share) if s > 0}
    return {"lag": float(lag.double().mean()), "lag_max": int(lag.max()), **named}
