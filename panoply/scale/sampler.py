"""A sampler: world, policy, engine and collector, made anew from the plan, and asked for shares of a batch.

It decides nothing. The driver says which tasks, which numbers the episodes have and whose weights act; seeds are hashes
of these numbers, and no product is of few rows (`STEADY`), so that an episode is the same bit for bit whoever plays it,
and in whatever company.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.kinds import kind_of
from panoply.loops.metrics import peak_memory
from panoply.policies.build import learning, model_source, pick_device
from panoply.policies.lora import open_adapted
from panoply.rollout.engine import STEADY
from panoply.rollout.engines import engine_of
from panoply.rollout.requests import Request
from panoply.rollout.sampling import Sampling
from panoply.rollout.text import Collector
from panoply.scale import travel, wire
from panoply.scale.weights import Files, Parcel, opened
from panoply.selves import LEARNER
from panoply.worlds.world import Signals, earned

if TYPE_CHECKING:
    from panoply.planning import Plan
    from panoply.policies.text import TextPolicy
    from panoply.rollout.rollouts import Rollouts

Share = Mapping[str, Any]
"""What one sampler is asked for: tasks, how many episodes of each, their numbers and groups, and how to sample."""
PAUSE = 0.02
"""Seconds between two looks for newer weights."""
FAILED = "failed"
"""The column of rows whose episode could not be graded, on their way to the driver, who leaves them out."""


class Sampler:
    def __init__(self, parcel: Mapping[str, Any], source: str = ""):
        self.plan = travel.unpacked(parcel)
        self.world: Any = self.plan.world()
        learner = begun(self.plan, self.world, source)
        self.players = {LEARNER: self._player(learner)}

    def _player(self, policy: TextPolicy) -> Player:
        options = self.plan.options
        return Player(self.world, policy, options.seed, engine=options.engine)

    def take(self, who: str, version: int, parcel: Parcel, content: Any = None) -> str:
        """Have somebody act with these weights from now on; the checksum of those that arrived."""
        if who not in self.players:
            self.players[who] = self._player(self.players[LEARNER].policy.copy())
        player = self.players[who]
        player.version, player.has = version, None
        weights = opened(parcel, content, player.policy.device)
        return player._engine.publish(weights, version)

    def play(self, share: Share) -> dict[str, Any]:
        """Whole groups, graded; what could not be is marked."""
        began, before = time.perf_counter(), dict(self.world.failures())
        player = self.players[share["who"]]
        found = player.played(share)
        why = {w: n - before.get(w, 0) for w, n in self.world.failures().items() if n > before.get(w, 0)}
        return {
            "experience": wire.packed(found),
            "why": why,
            "longest": player.longest,
            "signal": player.signal,
            "has": player.has,
            "version": player.version,
            **self._spent(began, len(found)),
        }

    def draw(self, share: Share) -> dict[str, Any]:
        """Tokens alone: what follows given contexts, of which the driver makes what it likes."""
        began = time.perf_counter()
        player = self.players[share["who"]]
        requests = [Request(p, s, most=m, begun=b) for p, s, m, b in share["requests"]]
        sampling = Sampling(
            **{**share["sampling"], "temperature": schedule(share["sampling"]["temperature"])}
        )
        rollouts = player.generate(requests, sampling, entropy=share["entropy"])
        return {**packed_rollouts(rollouts), **self._spent(began, rollouts.decisions.rows)}

    def _spent(self, began: float, tokens: int) -> dict[str, Any]:
        return {
            "busy": time.perf_counter() - began,
            "tokens": tokens,
            "memory_mb": peak_memory(),
        }

    def close(self) -> None:
        self.world.close()


def begun(plan: Plan, world: Any, source: str = "") -> TextPolicy:
    """The policy that a run began with, whose weights are written over; where that has gone, that of `source`."""
    options = plan.options
    if options.engine != "native":  # the GPU is the engine's
        options = dataclasses.replace(options, device="cpu")
    kind = kind_of(world)

    def open_(named: str, host: bool = False) -> Any:
        there = dataclasses.replace(options, device="cpu") if host else options
        return learning(kind.open_policy(named, world, there, plan.policy_options))

    if options.lora:
        folder = model_source(options.model, world)
        adapters = (options.lora, options.seed, plan.lora, pick_device(options.device))
        return open_adapted(open_, options.model, folder, *adapters)
    try:
        policy: TextPolicy = open_(options.model)
    except PanoplyError:
        if not source:
            raise
        policy = open_(source)
    return policy


def schedule(temperature: Any) -> Any:
    """A temperature, or a table of them by place in the turn, as `Sampling` takes it."""
    if isinstance(temperature, float | int):
        return temperature
    table = wire.tensor(temperature)
    return lambda within: table[within]


class Player(Collector):
    """A collector that plays what it is told, notes what the driver would have counted, and leaves nothing out."""

    def __init__(self, world: Any, policy: TextPolicy, seed: int, engine: str = "native"):
        super().__init__(world, policy, seed, engine=engine)
        if engine == "native" and not policy.masked:
            self._engine = engine_of(policy, least=STEADY)
        self.longest: list[int] = []
        """Of every call of the engine, the tokens of its longest row."""
        self.signal = 0.0
        self.has: str | None = None
        """The checksum of weights that it has taken itself."""
        self._again = 0.0

    def played(self, share: Share) -> Experience:
        self.longest, self.signal, self.counted = [], 0.0, share["counted"]
        self.state |= {"episodes": share["first"], "groups": 0}
        # whoever takes weights itself may have newer ones than the share was begun with
        self.version = share["version"] if share["board"] is None else max(share["version"], self.version)
        how = dict(share["how"])
        how["temperature"] = schedule(how["temperature"])
        if share["board"] is None:
            return self.episodes(share["tasks"], share["sizes"], into=torch.tensor(share["keys"]), **how)
        engine: Any = self._engine
        engine.between = partial(self._look, share["board"])
        try:
            return self.episodes(share["tasks"], share["sizes"], into=torch.tensor(share["keys"]), **how)
        finally:
            engine.between = None

    def _look(self, board: str) -> int:
        """In the midst of answers: take newer weights where there are any, and say of which version they are."""
        now = time.monotonic()
        if now >= self._again:
            self._again = now + PAUSE
            if not Path(board).is_dir():
                raise PanoplyError(
                    f"--inflight needs a disk that all machines share: a sampler cannot see {board}, where weights are."
                )
            newest = Files.newest(board)
            if newest is not None and newest[0] > self.version:
                with contextlib.suppress(FileNotFoundError):  # newer ones have taken its place
                    weights, sent = Files.read(newest[1])
                    if (found := self._engine.publish(weights, newest[0])) != sent:
                        raise PanoplyError(
                            f"Weights of step {newest[0]} arrived as others ({found}, not {sent})."
                        )
                    self.version, self.has = newest[0], sent
        return self.version

    def generate(self, *args: Any, **kwargs: Any) -> Rollouts:
        before = self.state["decode_steps"]
        found = super().generate(*args, **kwargs)
        self.longest.append(self.state["decode_steps"] - before)
        return found

    def count_signals(self, earned_: Sequence[Signals]) -> None:
        if self.counted is not None:
            self.signal += sum(earned(signals.get(self.counted, 0.0)) for signals in earned_)

    def _graded(self, experience: Experience, row: Tensor, failed: Sequence[int], played: int) -> Experience:
        return experience.with_columns(**{FAILED: torch.isin(row, torch.tensor(failed))})


# ------------------------------------------------------------------ what an engine gave


def packed_rollouts(rollouts: Rollouts) -> dict[str, Any]:
    return {
        "experience": wire.packed(Experience(rollouts.decisions, rollouts.context)),
        "request": rollouts.request.numpy(),
        "reasons": rollouts.reasons.tolist(),
        "end": rollouts.end.numpy(),
    }
