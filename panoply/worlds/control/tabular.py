"""Markov decision processes small enough to be solved exactly: what is learnt can be held against what is true."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.seeds import numpy_rng
from panoply.worlds.control.drawing import BLUE, FAINT, GOLD, GREEN, INK, Canvas
from panoply.worlds.control.mdp import MDP
from panoply.worlds.control.simulated import Draws, Moved, Simulated, State
from panoply.worlds.control.world import Array, Discrete, Space
from panoply.worlds.measures import measures

if TYPE_CHECKING:
    from panoply.policies.control import ControlPolicy

Variant = Literal["chain", "corridor", "lock", "tree", "riverswim", "random", "windy"]
WIND = (0, 0, 0, 1, 1, 1, 2, 2, 1, 0)
ROWS, START, GOAL = 7, (3, 0), (3, 7)


MOST_ENTRIES = 10**8
"""Of a table of transitions."""


@world("tabular@1")
@dataclass(frozen=True)
class Tabular(Simulated):
    """Small MDPs whose values are known exactly: `world.mdp` gives P and R, and solves them.

    - `chain`: forward along `size` states, or back to the first for 0.2; the last pays 1 a step. (Strens 2000)
    - `corridor`: left or right; 1 at the right end, which ends the episode.
    - `lock`: one right action of `actions` at each of `size` depths leads on; the end pays 1, a wrong action `lure`
      and no more.
    - `tree`: `actions` branches at each of `size` depths; `goals` of the leaves pay 1.
    - `riverswim`: against the current to a reward of 1, or with it to 0.005. (Strehl and Littman 2008)
    - `random`: each action leads to `branching` states at random, rewards are uniform. (Garnet)
    - `windy`: Sutton and Barto's grid of 7 × 10, the wind blowing with probability `wind`; −1 a step.

    A state is seen as its number. `slip` is the probability that another action happens than was chosen.
    """

    variant: Variant = "chain"
    size: int | None = None
    """States of a chain, corridor, river or random MDP (5, 7, 6, 10), depth of a lock or tree (6, 3)."""
    actions: int | None = None
    """In a lock (4), tree (4) or random MDP (2)."""
    slip: float = 0.0
    lure: float = 0.1
    goals: int = 4
    branching: int = 3
    wind: float = 1.0
    seed: int = 0
    """Draws the lock, the tree's goals, the random MDP."""
    gamma: float = 0.99
    """The discount under which the expert is best; where there is no end, under which values exist."""
    horizon: int | None = 50

    bounds: ClassVar[Mapping[str, str]] = {
        "size": "from 2 to 10000",
        "actions": "from 2 to 10000",
        "slip": "from 0 to 1",
        "lure": "any number",
        "goals": "from 1 to 100000",
        "branching": "from 1 to 10000",
        "wind": "from 0 to 1",
        "seed": "any whole number",
        "gamma": "from 0 to 1",
        "horizon": "from 1 to 10000000",
    }

    access = Simulated.access | {"model"}

    def __post_init__(self) -> None:
        super().__post_init__()
        usual = {"chain": 5, "corridor": 7, "riverswim": 6, "random": 10, "lock": 6, "tree": 3, "windy": 70}
        many = {"lock": 4, "tree": 4, "random": 2, "windy": 4}
        for option, value in (("size", usual[self.variant]), ("actions", many.get(self.variant, 2))):
            if getattr(self, option) is None:
                object.__setattr__(self, option, value)
        self._check_entries()
        if self.variant == "tree" and not 1 <= self.goals <= self.actions**self.size:  # type: ignore[operator]
            raise PanoplyError("tabular.goals is a number of the tree's leaves.")
        if self.variant == "random" and not 1 <= self.branching <= (self.size or 0):
            raise PanoplyError("tabular.branching is a number of states.")

    def _check_entries(self) -> None:
        """Refuse tables that no memory holds: states × actions × states."""
        size, actions = self.size or 0, self.actions or 0
        states = actions ** min(size, 64) if self.variant == "tree" else size
        if states * states * actions > MOST_ENTRIES:
            raise PanoplyError(
                f"tabular.size {size} and tabular.actions {actions} make a table of more than {MOST_ENTRIES:,} entries."
            )

    @property
    def mdp(self) -> MDP:
        return build(self)

    @property
    def sees(self) -> Space:  # type: ignore[override]
        return Discrete(self.mdp.states)

    @property
    def takes(self) -> Space:  # type: ignore[override]
        return Discrete(self.mdp.actions)

    def start(self, draws: Draws) -> State:
        return {"at": draws.choice(np.broadcast_to(self.mdp.start, (len(draws.seeds), self.mdp.states)))}

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        mdp, at = self.mdp, state["at"]
        to = (draws.uniform(1) >= mdp.cumulative[at, actions]).sum(-1)
        return Moved({"at": to}, mdp.rewards[at, actions, to], mdp.terminal[to])

    def look(self, state: State) -> Array:
        return state["at"]

    def key(self, state: State) -> Array | None:
        return state["at"]

    def expert(self, state: State) -> Array:
        best: Array = _solved(self).argmax(-1)[state["at"]]
        return best

    @measures("value")
    def value_of(self, policy: ControlPolicy, seed: int) -> float:
        """What the policy earns in an episode on average, exactly; without a time limit, discounted by `gamma`."""
        gamma = 1.0 if self.horizon else self.gamma
        return self.mdp.value(policy.chances(np.arange(self.mdp.states)), gamma, self.horizon)

    @measures("regret")
    def regret_of(self, policy: ControlPolicy, seed: int) -> float:
        """How much less that is than the best policy earns."""
        gamma = 1.0 if self.horizon else self.gamma
        return self.mdp.best(gamma, self.horizon) - self.value_of(policy, seed)

    def picture(self, state: State, size: int = 240) -> Array:
        """States in rows of ten, in the order of their numbers; windy ones as the grid they are."""
        mdp, here = self.mdp, int(state["at"][0])
        wide = min(10, mdp.states)
        high = math.ceil(mdp.states / wide)
        sheet = Canvas(size, (0, wide), (0, high))
        paying = (mdp.transitions * mdp.rewards).max((0, 1)) > 0
        for number in range(mdp.states):
            x, y = number % wide, high - 1 - number // wide
            colour = GREEN if paying[number] else INK if mdp.terminal[number] else FAINT
            sheet.box((x + 0.06, y + 0.06), (x + 0.94, y + 0.94), colour, 0.12)
            if number == here:
                sheet.disc((x + 0.5, y + 0.5), 0.3, GOLD, BLUE)
        return sheet.pixels()


@functools.lru_cache(maxsize=64)
def build(world: Tabular) -> MDP:
    """The MDP of a world's settings."""
    made = _VARIANTS[world.variant](world)
    if not world.slip:
        return made
    others = (made.transitions.sum(1, keepdims=True) - made.transitions) / (made.actions - 1)
    mixed = (1 - world.slip) * made.transitions + world.slip * others
    chosen = made.transitions * made.rewards
    other = (chosen.sum(1, keepdims=True) - chosen) / (made.actions - 1)
    paid = (1 - world.slip) * chosen + world.slip * other
    rewards = np.divide(paid, mixed, out=np.zeros_like(paid), where=mixed > 0)
    return MDP(mixed, rewards, made.start, made.terminal)


@functools.lru_cache(maxsize=64)
def _solved(world: Tabular) -> Array:
    return world.mdp.optimal(world.gamma)


class _Draft:
    """An MDP under construction, in which every action stays where it is until told otherwise."""

    def __init__(self, states: int, actions: int, start: int = 0):
        self.transitions = np.zeros((states, actions, states))
        self.rewards = np.zeros((states, actions, states))
        self.begin = np.eye(states)[start]
        self.terminal = np.zeros(states, bool)

    def go(self, at: int, action: int, to: int, pays: float = 0.0, chance: float = 1.0) -> None:
        self.transitions[at, action, to] += chance
        self.rewards[at, action, to] = pays

    def done(self, *terminal: int) -> MDP:
        self.terminal[list(terminal)] = True
        for at, action in np.argwhere(self.transitions.sum(-1) == 0):
            self.go(at, action, at)
        return MDP(self.transitions, self.rewards, self.begin, self.terminal)


def _chain(world: Tabular) -> MDP:
    size = _int(world.size)
    draft = _Draft(size, 2)
    for at in range(size):
        draft.go(at, 0, min(at + 1, size - 1), 1.0 if at == size - 1 else 0.0)
        draft.go(at, 1, 0, 0.2)
    return draft.done()


def _corridor(world: Tabular) -> MDP:
    size = _int(world.size)
    draft = _Draft(size, 2)
    for at in range(size - 1):
        draft.go(at, 0, max(at - 1, 0))
        draft.go(at, 1, at + 1, float(at + 1 == size - 1))
    return draft.done(size - 1)


def _lock(world: Tabular) -> MDP:
    """States 0 … size−1 are depths; then the end, and where wrong actions lead."""
    depth, actions = _int(world.size), _int(world.actions)
    right = numpy_rng("lock", world.seed).integers(actions, size=depth)
    draft = _Draft(depth + 2, actions)
    for at in range(depth):
        for action in range(actions):
            if action == right[at]:
                draft.go(at, action, at + 1, float(at + 1 == depth))
            else:
                draft.go(at, action, depth + 1, world.lure)
    return draft.done(depth, depth + 1)


def _tree(world: Tabular) -> MDP:
    """Node i has the children actions·i + 1 … actions·i + actions; the last level are the leaves."""
    depth, actions = _int(world.size), _int(world.actions)
    inner = (actions**depth - 1) // (actions - 1)
    leaves = actions**depth
    if inner + leaves > 2000:
        raise PanoplyError(
            f"A tree of {inner + leaves} nodes is too large for exact tables; 2000 are enough."
        )
    chosen = numpy_rng("tree", world.seed).permutation(leaves)[: world.goals] + inner
    draft = _Draft(inner + leaves, actions)
    for at in range(inner):
        for action in range(actions):
            child = actions * at + 1 + action
            draft.go(at, action, child, float(child in chosen))
    return draft.done(*range(inner, inner + leaves))


def _riverswim(world: Tabular) -> MDP:
    size = _int(world.size)
    draft = _Draft(size, 2)
    for at in range(size):
        draft.go(at, 0, max(at - 1, 0), 0.005 if at == 0 else 0.0)
        up, stay, down = (0.6, 0.4, 0.0) if at == 0 else (0.35, 0.6, 0.05)
        if at == size - 1:
            up, stay, down = 0.0, 0.6, 0.4
        pays = float(at == size - 1)
        for to, chance in ((at + 1, up), (at, stay), (at - 1, down)):
            if chance:
                draft.go(at, 1, to, pays, chance)
    return draft.done()


def _random(world: Tabular) -> MDP:
    states, actions = _int(world.size), _int(world.actions)
    rng = numpy_rng("random", world.seed)
    transitions = np.zeros((states, actions, states))
    for at in range(states):
        for action in range(actions):
            to = rng.permutation(states)[: world.branching]
            transitions[at, action, to] = rng.dirichlet(np.ones(world.branching))
    rewards = np.broadcast_to(rng.random((states, actions, 1)), transitions.shape).copy()
    return MDP(transitions, rewards, np.full(states, 1 / states), np.zeros(states, bool))


def _windy(world: Tabular) -> MDP:
    """Up, down, left, right; the wind of the column that is left carries up."""
    wide = len(WIND)
    goal = GOAL[0] * wide + GOAL[1]
    draft = _Draft(ROWS * wide, 4, START[0] * wide + START[1])
    for row in range(ROWS):
        for column in range(wide):
            for action, (down, right) in enumerate(((-1, 0), (1, 0), (0, -1), (0, 1))):
                for blown, chance in ((WIND[column], world.wind), (0, 1 - world.wind)):
                    to_row = min(max(row + down - blown, 0), ROWS - 1)
                    to_column = min(max(column + right, 0), wide - 1)
                    draft.go(row * wide + column, action, to_row * wide + to_column, -1.0, chance)
    return draft.done(goal)


def _int(value: int | None) -> int:
    assert value is not None
    return value


_VARIANTS = {
    "chain": _chain,
    "corridor": _corridor,
    "lock": _lock,
    "tree": _tree,
    "riverswim": _riverswim,
    "random": _random,
    "windy": _windy,
}
