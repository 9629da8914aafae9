"""A rank: one of the learners of a group, wherever it is. It is told rows with their weights, and only sums.

It holds what a run of one process would: the seats of the plan, whose learners have their weights whole and move the
part that is theirs (`shards.py`). What decides (counts, weights, credit, what terms remember) stays with the driver.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from panoply import checkpoint
from panoply.batch import Totals
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.kinds import Collector
from panoply.loops.learner import Learner, weightless
from panoply.loops.metrics import peak_memory
from panoply.loops.mover import Masters
from panoply.loops.objective import Weighed
from panoply.loops.samples import Watch
from panoply.loops.seat import Seat, seated
from panoply.scale import wire
from panoply.scale.meeting import Meeting, free_address, meet
from panoply.scale.plain import Array, heard, to_array, to_tensor, told
from panoply.scale.sharded import Sharded, shard
from panoply.scale.shards import Shards
from panoply.scale.travel import unpacked

Key = tuple[str, str]
"""A learner: the name of its seat, and of the model beside the policy that it teaches, if it is not the policy."""
Diary = dict[str, float]
"""What a rank says of itself: seconds at work and decisions learned from, and the memory it takes."""
AGAIN = "again"
"""In place of rows: those of the last passes."""


class Rank:
    """Made of a plan on its way (`travel.py`); it stands when it has joined the others."""

    def __init__(self, parcel: Mapping[str, Any]):
        plan = unpacked(parcel)
        alone = dataclasses.replace(plan.options, learners=0, samplers=0, engine="native")
        self.plan = dataclasses.replace(plan, options=alone)
        self.seats: dict[str, Seat] = {}
        self.shards: dict[int, Shards | Sharded] = {}
        """By the weights that they are of."""
        self.nodes = 1
        self.meeting: Meeting | None = None
        self.busy, self.tokens = 0.0, 0
        self.held: dict[Key, tuple[Experience | None, bool]] = {}
        """The rows of each learner's last passes, and whether they are its own."""

    def address(self) -> str:
        """Where the others can meet, if this is the first of them."""
        return free_address()

    def join(self, rank: int, size: int, address: str, found: str | None = None, nodes: int = 1) -> None:
        """Meet the others, and make what one process would make of the plan.

        found   the checkpoint that the run goes on from, which will be taken up with `resume`
        nodes   over how many machines pieces of a model are not to be spread, but copied
        """
        self.nodes = nodes
        device = torch.device("cuda") if _on_gpu(self.plan.options.device) else torch.device("cpu")
        self.meeting = meet(rank, size, address, device)
        self.seats = seated(self.plan, self.plan.world(), Path(found) if found else None, cast(Any, self))

    # -------------------------------------------------------------- who does the work, as seats ask for it

    def collector(self, seat: Seat) -> Callable[..., Collector]:
        return seat.kind.collector

    def learner(self, seat: Seat, model: str = "") -> Callable[..., Learner]:
        return partial(self._taught, seat)

    def _taught(self, seat: Seat, *args: Any, **settings: Any) -> Learner:
        assert self.meeting is not None
        if self.plan.options.layout != "sharded" or self.meeting.size == 1:  # one has all the pieces
            return Learner(*args, share=self._share, **settings)
        decoder = cast(Any, seat.policy).model
        shard(decoder, self.nodes, self.meeting.size)
        made = Learner(*args, **settings)
        made.together = self._most
        self.shards[id(made.masters)] = Sharded(made.masters, self.meeting, decoder)
        return made

    def _most(self, passes: int) -> int:
        """How many passes the rank makes that has most to do."""
        assert self.meeting is not None
        counts = torch.zeros(self.meeting.size)
        counts[self.meeting.rank] = passes
        return int(self.meeting.sum(counts).max())

    def compared(self, seat: Seat, experience: Experience) -> Experience:
        return seat.snapshots.score(experience)

    def ahead(self, seat: Seat) -> None:
        """Nobody samples here."""

    def _share(self, masters: Masters) -> None:
        assert self.meeting is not None
        self.shards[id(masters)] = Shards(masters, self.meeting)

    def _learner(self, key: Key) -> tuple[Learner, Shards | Sharded]:
        seat, model = self.seats[key[0]], key[1]
        learner = cast(Learner, seat.models.learners[model] if model else seat.learner)
        return learner, self.shards[id(learner.masters)]

    # -------------------------------------------------------------- learning

    def passes(
        self,
        key: Key,
        step: int,
        rows: wire.Packed | str | None,
        own: bool,
        prepared: Mapping[str, Any],
        watched: Array | None,
    ) -> tuple[dict[str, Any], float, dict[str, Any] | None]:
        """Gradients of these rows, summed with the others'; what terms said of them, and the norm of the sum.

        rows  packed, or `AGAIN`, or None where there are none for this rank
        own   whether they are this rank's, and not some that it only keeps step with
        """
        learner, shards = self._learner(key)
        learner.watch = Watch(to_tensor(watched)) if watched is not None else None
        totals = Totals()
        with self._working():
            active = learner.objective.active(step)
            if not isinstance(rows, str):
                self.held[key] = (None if rows is None else wire.unpacked(rows), own)
            held, own = self.held[key]
            if held is None:
                learner.masters.clear()
            elif own:
                self.tokens += len(held)
                totals = learner.passes(Weighed(held, active, heard(prepared)))
            else:
                learner.passes(Weighed(weightless(held), active, heard(prepared)))
        norm = shards.sum()
        return totals.said(), norm, learner.watch.said() if learner.watch is not None else None

    def scored(self, key: Key, step: int, rows: wire.Packed) -> dict[str, Array]:
        """What the policy says of rows, without gradient."""
        learner, _ = self._learner(key)
        with self._working():
            held = wire.unpacked(rows)
            found = learner.scored(held, learner.objective.active(step))
            return cast(dict[str, Array], told(found))

    def compare(self, seat: str, step: int, rows: wire.Packed) -> dict[str, Array]:
        """The columns of other selves of the policy."""
        with self._working():
            snapshots, held = self.seats[seat].snapshots, wire.unpacked(rows)
            if self.seats[seat].method.phased:
                snapshots.begin(step)
            found = snapshots.score(held)
            new = found.decisions.keys() - held.decisions.keys()
            return {name: to_array(found[name]) for name in found.decisions if name in new}

    def move(self, key: Key, step: int) -> None:
        """One step of the optimiser, on the weights that are this rank's, and then all have all."""
        learner, shards = self._learner(key)
        with self._working():
            learner.mover.set_rate(step)
            shards.clip(learner.mover.limit)
            with shards.own_alone():
                learner.mover.move()
        shards.hand_around()

    def gradient(self, key: Key) -> dict[str, Array]:
        """Of the weights that are this rank's."""
        _, shards = self._learner(key)
        return cast(dict[str, Array], told(shards.gradient()))

    # -------------------------------------------------------------- weights, and what belongs to them

    def weights(self, key: Key) -> tuple[dict[str, Array], Diary]:
        """All that learn, which the first rank says for all; and what this one did since it was last asked."""
        learner, shards = self._learner(key)
        learning = {n: p for n, p in learner.policy.named_parameters() if p.requires_grad}
        return cast(dict[str, Array], told(shards.first_only(learning))), self.diary()

    @torch.no_grad()
    def take(self, key: Key, beside: Mapping[str, Array]) -> None:
        """What has changed elsewhere without being learned: statistics, or a model that learns without gradients."""
        learner, _ = self._learner(key)
        mine = not_learned(learner.policy)
        for name, array in beside.items():
            mine[name].copy_(to_tensor(array))

    def become(self, seat: str, step: int, best: bool) -> None:
        """After a step: other selves of the policy become what their rules say."""
        self.seats[seat].snapshots.renew(step, best)

    def state(self, key: Key) -> dict[str, Array]:
        """What the optimiser keeps of this rank's weights."""
        learner, shards = self._learner(key)
        return cast(dict[str, Array], told(shards.kept(learner.mover.state()) if learner.keeps else {}))

    def resume(self, folder: str) -> None:
        """Take up a checkpoint, as a run of one process would."""
        if not Path(folder).is_dir():
            raise PanoplyError(
                f"A learner cannot see {folder}: runs with learners on several machines are stored on a disk that all "
                "of them share."
            )
        found = checkpoint.Checkpoint(Path(folder))
        state, tensors = found.state(), found.tensors()
        for number, (name, seat) in enumerate(self.seats.items()):
            seat.load(found.folder, cast(Any, state if not number else state["seats"][name]), tensors)
            seat.collect.version = state["step"]

    # -------------------------------------------------------------- what it says of itself

    @contextmanager
    def _working(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.busy += time.perf_counter() - start

    def diary(self) -> Diary:
        """Since the last time."""
        said = {"busy": round(self.busy, 4), "tokens": self.tokens, "memory_mb": peak_memory()}
        self.busy, self.tokens = 0.0, 0
        return said


def not_learned(policy: Any) -> dict[str, Tensor]:
    """What a pass reads and no gradient moves: frozen weights and buffers, of the policy and models beside it."""
    found = {n: p for n, p in policy.named_parameters() if not p.requires_grad}
    for name, model in _modules(policy):
        found |= {f"{name}#{key}": buffer for key, buffer in model.named_buffers()}
    return found


def _modules(policy: Any) -> Iterable[tuple[str, nn.Module]]:
    beside: Mapping[str, Any] = getattr(policy, "models", {})
    for name, held in {"": policy, **beside}.items():
        module = getattr(held, "model", held)
        if isinstance(module, nn.Module):
            yield name, module


def _on_gpu(device: str) -> bool:
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
