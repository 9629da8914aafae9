"""Worlds written as functions of a state: how episodes start, how they move, what is seen of them.

A state is a dictionary of columns, one row an environment, so that a batch moves in a few array operations, and copying
an environment (`fork`), going back to where it was (`reset_to`) and wrapping it (`wrappers.py`) need nothing from the
world.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from panoply.errors import PanoplyError
from panoply.seeds import stable_hash
from panoply.worlds.control.world import Array, Box, ControlWorld, Discrete, Envs, Space, Step

State = dict[str, Array]


class Moved(NamedTuple):
    """What a step makes of a batch."""

    state: State
    reward: Array
    terminated: Array
    signals: Mapping[str, Array] = {}


class Dynamics(ABC):
    """Pure functions of states. `sees` and `takes` are the spaces of what `look` gives and `move` accepts."""

    sees: Space
    takes: Space

    @abstractmethod
    def start(self, draws: Draws) -> State:
        """First states, one for each row of `draws`."""

    @abstractmethod
    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        """States after an action in each row. The given state is not changed."""

    @abstractmethod
    def look(self, state: State) -> Array:
        """What a policy sees of the states."""

    def allowed(self, state: State) -> Array | None:
        """Which discrete actions can be taken; None where all can."""
        return None

    def key(self, state: State) -> Array | None:
        """A number by which states that recur are known, in worlds that have few."""
        return None

    def expert(self, state: State) -> Array:
        """Actions of the scripted expert."""
        raise PanoplyError(f"{type(self).__name__.lower()} has no expert.")

    def picture(self, state: State, size: int = 240) -> Array:
        """The first row as an image: height, width, and three bytes of colour."""
        raise PanoplyError(f"{type(self).__name__.lower()} has no pictures.")


class Simulated(Dynamics, ControlWorld):
    """A world made of pure functions. It can be forked and reset to any state it was in."""

    access = frozenset({"step", "verify", "fork", "reset_to"})
    constants: ClassVar[tuple[str, ...]] = ()
    """Settings that episodes may each draw for themselves, where a wrapper lets them (`physical.py`)."""

    @property
    def dynamics(self) -> Dynamics:
        """The world with its wrappers around it."""
        return self

    @property
    def observation(self) -> Space:
        return self.dynamics.sees

    @property
    def action(self) -> Space:
        return self.dynamics.takes

    def constant(self, state: State, name: str) -> Array | float:
        """One of the constants: the episode's own where it was drawn, else the setting."""
        value: Array | float = state.get(name, getattr(self, name))
        return value

    def envs(self, size: int) -> Simulation:
        return Simulation(self.dynamics, self.horizon, size)


class Simulation(Envs):
    """A batch of environments of one `Dynamics`."""

    def __init__(self, dynamics: Dynamics, horizon: int | None, size: int):
        self.dynamics, self.horizon, self.size = dynamics, horizon, size
        self.seeds, self.clock = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self.state = dynamics.start(Draws(self.seeds, 0))
        self._look()

    def reset(self, where: Array, seeds: Array) -> None:
        self.seeds[where], self.clock[where] = seeds, 0
        self._put(where, self.dynamics.start(Draws(self.seeds[where], 0)))

    def step(self, actions: Array) -> Step:
        self._check(actions)
        self.clock += 1
        moved = self.dynamics.move(self.state, actions, Draws(self.seeds, self.clock))
        self.state = moved.state
        self._look()
        late = np.zeros(self.size, bool) if self.horizon is None else self.clock >= self.horizon
        return Step(moved.reward, moved.terminated, late & ~moved.terminated, moved.signals)

    def fork(self, rows: Array) -> Simulation:
        """Another batch: copies of those rows as they stand, which go on with the same random numbers."""
        other = Simulation(self.dynamics, self.horizon, len(rows))
        other.seeds, other.clock = self.seeds[rows], self.clock[rows]
        other.state = {name: column[rows] for name, column in self.state.items()}
        other._look()
        return other

    def reset_to(self, where: Array, state: State, clock: Array | int = 0) -> None:
        """Put rows into states, such as `state` once held."""
        missing = sorted(set(self.state) - set(state))
        if missing:
            raise PanoplyError(f"A state to go to needs {', '.join(missing)}.")
        self.clock[where] = clock
        self._put(where, {name: np.asarray(state[name]) for name in self.state})

    def keys(self) -> Array | None:
        """Numbers by which the states that the rows are in are known, in worlds whose states recur."""
        return self.dynamics.key(self.state)

    def snapshot(self) -> Mapping[str, Array]:
        kept = {f"state.{name}": column for name, column in self.state.items()}
        return kept | {"seeds": self.seeds.copy(), "clock": self.clock.copy()}

    def restore(self, kept: Mapping[str, Array]) -> None:
        self.seeds, self.clock = kept["seeds"].copy(), kept["clock"].copy()
        self.state = {name: kept[f"state.{name}"] for name in self.state}
        self._look()

    def render(self, row: int) -> Array:
        return self.dynamics.picture({name: column[row : row + 1] for name, column in self.state.items()})

    def _put(self, where: Array, state: State) -> None:
        for name, column in state.items():
            changed = self.state[name].copy()
            changed[where] = column
            self.state[name] = changed
        self._look()

    def _look(self) -> None:
        self.observations = self.dynamics.look(self.state)
        self.masks = self.dynamics.allowed(self.state)

    def _check(self, actions: Array) -> None:
        takes = self.dynamics.takes
        if actions.shape != (self.size, *takes.shape):
            raise PanoplyError(
                f"Actions of shape {(self.size, *takes.shape)} are needed, not {actions.shape}."
            )
        if isinstance(takes, Discrete) and not 0 <= actions.min() <= actions.max() < takes.n:
            raise PanoplyError(f"An action is a whole number from 0 to {takes.n - 1}.")
        if isinstance(takes, Box) and not np.isfinite(actions).all():
            raise PanoplyError("An action is not a finite number.")


# ------------------------------------------------------------------ random numbers

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Draws:
    """The random numbers of one step: of each row, the first, the second, and so on, as they are asked for.

    They depend on each row's seed and clock alone: a number is a hash (splitmix64) of seed, clock and how many were
    drawn before it. So there is no generator to keep or save, and a row draws the same numbers whatever its place in
    the batch and wherever a run was interrupted.
    """

    def __init__(self, seeds: Array, clock: Array | int):
        self.seeds, self.clock = seeds, clock
        self.used = 0

    def of(self, name: str) -> Draws:
        """Another stream of the same rows, so that a wrapper draws without moving what the world draws."""
        salt = np.uint64(stable_hash(name))
        return Draws(self.seeds.astype(np.uint64) ^ salt, self.clock)

    def uniform(self, *shape: int, low: Array | float = 0.0, high: Array | float = 1.0) -> Array:
        """Numbers in [low, high), an array of `shape` for each row."""
        count = math.prod(shape)
        clock = np.atleast_1d(self.clock).astype(np.uint64)
        key = _mix(self.seeds.astype(np.uint64) + (clock + np.uint64(1)) * GOLDEN)
        index = np.arange(self.used + 1, self.used + count + 1, dtype=np.uint64)
        self.used += count
        bits = _mix(key[:, None] + index * GOLDEN) >> np.uint64(11)
        numbers = (bits.astype(np.float64) * 2.0**-53).reshape(len(key), *shape)
        scaled: Array = low + (high - low) * numbers
        return scaled

    def normal(self, *shape: int) -> Array:
        """Standard normal numbers (Box and Muller)."""
        pairs = self.uniform(*shape, 2)
        drawn: Array = np.sqrt(-2 * np.log1p(-pairs[..., 0])) * np.cos(2 * np.pi * pairs[..., 1])
        return drawn

    def below(self, n: Array | int, *shape: int) -> Array:
        """Whole numbers 0 … n−1."""
        drawn: Array = (self.uniform(*shape) * n).astype(np.int64)
        return drawn

    def chance(self, probability: Array | float) -> Array:
        """One coin a row."""
        thrown: Array = self.uniform() < probability
        return thrown

    def choice(self, probabilities: Array) -> Array:
        """For each row an index, by the row of probabilities."""
        drawn: Array = (self.uniform(1) >= np.cumsum(probabilities, -1)[:, :-1]).sum(-1)
        return drawn


def _mix(x: Array) -> Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = x ^ (x >> np.uint64(31))
    return mixed
