"""Terms of every unit, made so that a unit cut in two would give another number, pairs to cut, and small games."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from panoply.batch import Batch, Values
from panoply.experience import KEY_UNITS, Experience, Ragged, Table, Unit
from panoply.parts import Part, part
from panoply.worlds.control.world import Array, ControlWorld, Discrete, Envs, Space, Step


def toy_of(unit: Unit) -> Part:
    """Nonlinear in a unit's log-probability: one that is cut would give another number."""

    def squared(batch: Batch) -> Values:
        logp = batch.now["logp"]
        return (logp.sum()[None] if unit == "batch" else batch.by(unit).sum(logp)) ** 2, {}

    squared.__name__ = f"toy_{unit}"
    return part("loss", unit=unit)(squared)()


TOYS = {unit: toy_of(unit) for unit in (*KEY_UNITS, "batch")}


@part("loss", unit="list")
def toy_list(batch: Batch) -> Values:
    """The squared sum over a list's episodes of place times log-probability."""
    scores = batch.list_rows(batch.by("episode").sum(batch.now["logp"]), 0.0)
    return (scores * torch.arange(1, 1 + scores.shape[1])).sum(1) ** 2, {}


@part("loss", prepare=lambda batch, weight: {"mean": batch.now["logp"].mean(), "rows": len(batch.experience)})
def toy_prepared(batch: Batch, *, weight: float | Part = 1.0) -> Values:
    """Squared distance to the mini-batch's mean, which is a number and not differentiated."""
    return (batch.now["logp"] - batch.prepared["toy_prepared"]["mean"]) ** 2, {}


PAIRS = [(100, 101), (103, 104), (104, 100), (106, 107)]


def with_pairs(experience: Experience) -> Experience:
    chosen, rejected = zip(*PAIRS, strict=True)
    return experience.with_pairs(Table({"chosen": torch.tensor(chosen), "rejected": torch.tensor(rejected)}))


LISTS = [[102, 100, 101], [107, 104], [109, 106, 105, 108]]


def with_lists(experience: Experience) -> Experience:
    """Lists of unequal length, across groups."""
    return experience.with_lists(Table({"episodes": Ragged.from_lists(LISTS)}))


def with_keys(experience: Experience) -> Experience:
    """Every key there is: two games a group, three tasks, two domains and agents that cross all of them."""
    episode, turn = experience["episode"], experience["turn"]
    return experience.with_columns(
        segment=turn // 2, parent=episode // 4, game=episode // 2, step=turn,
        task=episode % 3, domain=experience["group"] // 2, agent=(episode % 5) // 3,
    )  # fmt: skip


@dataclass(frozen=True)
class Take(ControlWorld):
    """Two seats take one or two of so many stones in turn; who takes the last wins one from the other."""

    access: ClassVar[frozenset[str]] = frozenset({"verify"})
    stones: int = 4
    seats = 2

    @property
    def observation(self) -> Space:
        return Discrete(self.stones + 1)

    @property
    def action(self) -> Space:
        return Discrete(2)

    def envs(self, size: int) -> Envs:
        return _Take(self, size)


class _Take(Envs):
    def __init__(self, world: Take, size: int):
        self.world, self.size = world, size
        self.observations = np.zeros(size, dtype=np.int64)
        self.acting = np.zeros(size, dtype=bool)

    def reset(self, where: Array, seeds: Array) -> None:
        assert (seeds.reshape(-1, 2) == seeds[::2, None]).all(), "both seats begin one game"
        self.observations[where], self.acting[where] = self.world.stones, where % 2 == seeds % 2

    def step(self, actions: Array) -> Step:
        taken = np.where(self.acting, actions + 1, 0).reshape(-1, 2).sum(1)
        self.observations = np.maximum(self.observations - np.repeat(taken, 2), 0)
        over = self.observations == 0
        reward = np.where(over, np.where(self.acting, 1.0, -1.0), 0.0)
        self.acting = ~self.acting
        return Step(reward, over, np.zeros(self.size, dtype=bool), {"moves": np.ones(self.size)})


@dataclass(frozen=True)
class Pennies(ControlWorld):
    """Two seats show a side of a coin at once: the first wins where they are equal. Each leaves after its rounds."""

    rounds: tuple[int, int] = (1, 1)
    seats = 2

    @property
    def observation(self) -> Space:
        return Discrete(2)

    @property
    def action(self) -> Space:
        return Discrete(2)

    def envs(self, size: int) -> Envs:
        return _Pennies(self, size)


class _Pennies(Envs):
    def __init__(self, world: Pennies, size: int):
        self.size = size
        self.observations = np.arange(size) % 2
        self.rounds, self.elapsed = np.tile(world.rounds, size // 2), np.zeros(size, dtype=int)

    def reset(self, where: Array, seeds: Array) -> None:
        self.elapsed[where] = 0

    def step(self, actions: Array) -> Step:
        self.elapsed += 1
        won = np.where(actions[::2] == actions[1::2], 1.0, -1.0)
        reward = np.stack([won, -won], 1).ravel()
        return Step(reward, self.elapsed >= self.rounds, np.zeros(self.size, dtype=bool))


@dataclass(frozen=True)
class Secrets(ControlWorld):
    """Each of two seats holds a card that the other does not see; whatever they do, the higher one wins one."""

    seats = 2

    @property
    def observation(self) -> Space:
        return Discrete(3)

    @property
    def action(self) -> Space:
        return Discrete(2)

    def envs(self, size: int) -> Envs:
        return _Secrets(size)


class _Secrets(Envs):
    def __init__(self, size: int):
        self.size, self.observations = size, np.zeros(size, dtype=np.int64)

    def reset(self, where: Array, seeds: Array) -> None:
        self.observations[where] = np.where(where % 2 == 0, seeds // 2, seeds // 6) % 3

    def step(self, actions: Array) -> Step:
        gap = np.sign(self.observations[::2] - self.observations[1::2])
        over = np.ones(self.size, dtype=bool)
        return Step(np.stack([gap, -gap], 1).ravel().astype(float), over, ~over)
