"""Worlds around worlds: constants that vary, a push from outside, actions and observations that come late, chunks.

Each keeps columns of its own beside those of the world it wraps, so they nest in any order.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from panoply.errors import PanoplyError
from panoply.worlds.control.simulated import Draws, Dynamics, Moved, State
from panoply.worlds.control.world import Array, Box, Discrete, MultiDiscrete, Space


class Wrapper(Dynamics):
    """Passes everything on to the world inside, with the wrapper's own columns put back after each move."""

    own: tuple[str, ...] = ()

    def __init__(self, inside: Dynamics):
        self.inside = inside
        self.sees, self.takes = inside.sees, inside.takes

    def start(self, draws: Draws) -> State:
        return self.inside.start(draws)

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        moved = self.inside.move(state, actions, draws)
        return moved._replace(state=moved.state | {name: state[name] for name in self.own})

    def look(self, state: State) -> Array:
        return self.inside.look(state)

    def allowed(self, state: State) -> Array | None:
        return self.inside.allowed(state)

    def key(self, state: State) -> Array | None:
        return self.inside.key(state)

    def expert(self, state: State) -> Array:
        return self.inside.expert(state)

    def picture(self, state: State, size: int = 240) -> Array:
        return self.inside.picture(state, size)


class Vary(Wrapper):
    """Every episode has constants of its own, drawn uniformly within a share of the nominal ones.

    They are columns of the state under the names of the constants, so setting them (`reset_to`) gives any one body.
    With `reveal` they are appended to the observation, each divided by its nominal value.
    """

    def __init__(self, inside: Dynamics, nominal: Mapping[str, float], share: float, reveal: bool = False):
        super().__init__(inside)
        self.nominal, self.share, self.reveal = dict(nominal), share, reveal
        self.own = tuple(nominal)
        if reveal:
            self.sees = _longer(inside.sees, len(self.nominal), 1 - share, 1 + share)

    def start(self, draws: Draws) -> State:
        state = self.inside.start(draws)
        factors = draws.of("vary").uniform(len(self.nominal), low=1 - self.share, high=1 + self.share)
        return state | {name: v * factors[:, i] for i, (name, v) in enumerate(self.nominal.items())}

    def look(self, state: State) -> Array:
        seen = self.inside.look(state)
        if not self.reveal:
            return seen
        return _beside(seen, *(state[name] / value for name, value in self.nominal.items()))


class Adversary(Wrapper):
    """A push of at most `strength` on the body in every step, by chance or by a second player.

    As a second player's, the push is the last number (or numbers) of the action, from −1 to 1; the world's own action
    stands before it, a discrete one as its index.
    """

    own = ("push",)

    def __init__(self, inside: Dynamics, strength: float, numbers: int = 1, learner: bool = False):
        super().__init__(inside)
        self.strength, self.numbers, self.learner = strength, numbers, learner
        if learner:
            low, high = _limits(inside.takes)
            ends = (1.0,) * numbers
            self.takes = Box((len(low) + numbers,), (*low, *(-e for e in ends)), (*high, *ends))

    def start(self, draws: Draws) -> State:
        state = self.inside.start(draws)
        rows = len(draws.seeds)
        return state | {"push": np.zeros(rows if self.numbers == 1 else (rows, self.numbers))}

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        if self.learner:
            push = np.clip(actions[:, -self.numbers :], -1.0, 1.0)
            actions = actions[:, : -self.numbers]
            if isinstance(self.inside.takes, Discrete):
                actions = np.rint(actions[:, 0]).astype(np.int64).clip(0, self.inside.takes.n - 1)
        else:
            push = draws.of("adversary").uniform(self.numbers, low=-1.0, high=1.0)
        pushed = self.strength * (push[:, 0] if self.numbers == 1 else push)
        return super().move(state | {"push": pushed}, actions, draws)

    def expert(self, state: State) -> Array:
        """The world's own expert; the second player rests."""
        actions = self.inside.expert(state)
        if not self.learner:
            return actions
        return _beside(actions.reshape(len(actions), -1), np.zeros((len(actions), self.numbers)))


class Delay(Wrapper):
    """Actions take effect `steps` later; the first ones are idle. Those under way are appended to the observation.

    So the world stays Markov in what is seen. Idle is 0, or the middle of a range that 0 is not in.
    """

    own = ("queue",)

    def __init__(self, inside: Dynamics, steps: int):
        super().__init__(inside)
        self.steps = steps
        low, high = _limits(inside.takes)
        self.width = len(low)
        held = np.clip(0.0, low, high) if isinstance(inside.takes, Box) else np.zeros(self.width)
        self.idle = np.asarray(held, np.float64)
        self.sees = _longer(inside.sees, steps * self.width, min(low), max(high))

    def start(self, draws: Draws) -> State:
        queue = np.tile(self.idle, (len(draws.seeds), self.steps, 1))
        return self.inside.start(draws) | {"queue": queue}

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        queue = state["queue"]
        due = queue[:, 0]
        if not isinstance(self.inside.takes, Box):
            due = due.astype(np.int64)
        queue = np.concatenate([queue[:, 1:], actions.reshape(len(actions), 1, self.width)], 1)
        return super().move(state | {"queue": queue}, due.reshape(actions.shape), draws)

    def look(self, state: State) -> Array:
        return _beside(self.inside.look(state), state["queue"].reshape(len(state["queue"]), -1))


class Late(Wrapper):
    """What is seen is `steps` old; before that, the episode's first observation."""

    own = ("seen",)

    def __init__(self, inside: Dynamics, steps: int):
        super().__init__(inside)
        self.steps = steps

    def start(self, draws: Draws) -> State:
        state = self.inside.start(draws)
        seen = self.inside.look(state)
        return state | {"seen": np.repeat(seen[:, None], self.steps + 1, 1)}

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        moved = super().move(state, actions, draws)
        newest = self.inside.look(moved.state)[:, None]
        return moved._replace(state=moved.state | {"seen": np.concatenate([state["seen"][:, 1:], newest], 1)})

    def look(self, state: State) -> Array:
        return state["seen"][:, 0]


class Chunk(Wrapper):
    """An action is `steps` actions, taken one after the other without looking; what they earn is summed.

    An episode that ends within a chunk earns nothing more in it. A time limit counts chunks.
    """

    def __init__(self, inside: Dynamics, steps: int):
        super().__init__(inside)
        self.steps = steps
        space = inside.takes
        if isinstance(space, Box):
            self.takes = Box((steps, *space.shape), space.low * steps, space.high * steps)
        else:
            self.takes = MultiDiscrete((space.n if isinstance(space, Discrete) else 0,) * steps)
        if isinstance(space, MultiDiscrete):
            raise PanoplyError("Actions of several choices cannot be chunked.")

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        parts = actions.reshape(len(actions), self.steps, *self.inside.takes.shape)
        total, over = np.zeros(len(actions)), np.zeros(len(actions), bool)
        signals: dict[str, Array] = {}
        for index in range(self.steps):
            moved = self.inside.move(state, parts[:, index], draws.of(f"chunk {index}"))
            state = {name: _where(over, state[name], column) for name, column in moved.state.items()}
            total += np.where(over, 0.0, moved.reward)
            for name, signal in moved.signals.items():
                signals[name] = signals.get(name, 0.0) + np.where(over, 0.0, signal)
            over = over | moved.terminated
        return Moved(state, total, over, signals)

    def expert(self, state: State) -> Array:
        raise PanoplyError("There is no expert who chooses several actions at once.")


def _limits(space: Space) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The lowest and highest numbers of an action, written as a vector."""
    if isinstance(space, Box):
        return space.low, space.high
    counts = (space.n,) if isinstance(space, Discrete) else space.nvec
    return (0.0,) * len(counts), tuple(float(n - 1) for n in counts)


def _longer(space: Space, more: int, low: float, high: float) -> Box:
    if not isinstance(space, Box) or len(space.shape) != 1:
        raise PanoplyError("Only an observation that is a vector can be made longer.")
    bounded = bool(space.low)
    return Box(
        (space.shape[0] + more,),
        (*space.low, *(low,) * more) if bounded else (),
        (*space.high, *(high,) * more) if bounded else (),
    )


def _beside(seen: Array, *columns: Array) -> Array:
    wide = [column if column.ndim == 2 else column[:, None] for column in columns]
    return np.concatenate([seen, *wide], 1, dtype=seen.dtype, casting="same_kind")


def _where(over: Array, kept: Array, moved: Array) -> Array:
    """Rows that are over keep what they had."""
    return np.where(over.reshape(-1, *(1,) * (moved.ndim - 1)), kept, moved)
