"""Grid worlds from a generator: rooms, mazes, lakes, things to find and things to avoid, ground to cover."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.worlds.control import gridviews
from panoply.worlds.control.levels import MOVES, Layout, Level, level
from panoply.worlds.control.mdp import MDP
from panoply.worlds.control.simulated import Draws, Moved, Simulated, State
from panoply.worlds.control.world import Array, Discrete, Space

View = Literal["planes", "vector", "state", "categories", "pixels"]


@world("grid@1")
@dataclass(frozen=True)
class Grid(Simulated):
    """Walk a grid (up, right, down, left) and find what pays, avoid what does not, or cover ground.

    A level is made from a number: a `layout` of walls or holes, a start, and objects. Kind i of them has `counts[i]`
    pieces; one that is walked on pays `pays[i]`, ends the episode with probability `ends[i]`, is gone, and comes back
    with probability `returns[i]` a step. Falling into a hole ends the episode.

    An episode's level is drawn from its seed, from `levels` of them or from all there are, or is always `level`.

    With `reward=coverage` a step pays for the ground newly covered (the cell and its four neighbours) as a share of
    all there is, weighted by a density with a peak in the level's middle; with `modular` it pays what the cell covers
    whether it is new or not, again and again. Without objects (`counts=0`) there is nothing but ground.

    Signals: `success` (an object that pays was reached), `covered` (the ground newly covered), `alone` (the ground
    that the cell covers).
    """

    layout: Layout = "rooms"
    size: int = 7
    density: float = 0.2
    """Share of cells that are walls (scatter) or holes (lake), of a maze's walls that are opened."""
    counts: tuple[int, ...] = (1,)
    pays: tuple[float, ...] = (1.0,)
    ends: tuple[float, ...] = (1.0,)
    returns: tuple[float, ...] = (0.0,)
    slip: float = 0.0
    """Probability of going to one of the two sides instead. FrozenLake's is 2/3."""
    cost: float = 0.0
    """Of a step."""
    reward: Literal["objects", "coverage", "modular"] = "objects"
    view: View = "planes"
    """`planes` (channels × size × size), `vector` (where the agent and the objects are), `state` (one number),
    `categories` (whole numbers: place, what is around, which objects are left, distractors), `pixels`."""
    clock: bool = False
    """In `vector` and `state`: the time is seen too."""
    history: bool = False
    """In `vector`: the ground covered so far is seen too, cell by cell, as it is in `planes` anyway."""
    pixels: int = 3
    """Pixels a cell is wide, in `pixels`."""
    distractors: int = 0
    """In `categories`: columns of noise. In `pixels` and `planes`, if not 0: a dot that walks about."""
    level: int | None = None
    levels: int | None = None
    horizon: int | None = 50

    bounds: ClassVar[Mapping[str, str]] = {
        "size": "from 3 to 1000",
        "density": "from 0 to 1",
        "counts": "from 0 to 10000",
        "pays": "any number",
        "ends": "any number",
        "returns": "any number",
        "slip": "from 0 to 1",
        "cost": "any number",
        "pixels": "from 1 to 64",
        "distractors": "from 0 to 100000",
        "level": "at least 0",
        "levels": "at least 1",
        "horizon": "from 1 to 10000000",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = len(self.counts)
        if not kinds or {len(self.pays), len(self.ends), len(self.returns)} != {kinds}:
            raise PanoplyError("grid.counts, pays, ends and returns have one number for each kind of object.")
        if (self.clock and self.view not in ("vector", "state")) or (self.history and self.view != "vector"):
            raise PanoplyError("grid.clock is for the views vector and state, grid.history for vector.")
        if self.clock and self.horizon is None:
            raise PanoplyError("grid.clock needs a grid.horizon, or time would have no end.")
        if self.layout == "maze" and self.size % 2 == 0:
            raise PanoplyError(f"grid.size is odd for a maze, not {self.size}.")
        if self.view == "state" and self.objects > 8:
            raise PanoplyError(
                "grid.view=state is for at most 8 objects: states are places × which are left."
            )

    @property
    def access(self) -> frozenset[str]:  # type: ignore[override]
        fixed = self.level is not None and self.reward == "objects" and not (any(self.returns) or self.clock)
        return Simulated.access | ({"model"} if fixed else set())

    @property
    def cells(self) -> int:
        return self.size * self.size

    @property
    def objects(self) -> int:
        return sum(self.counts)

    @property
    def kinds(self) -> Array:
        """The kind of each object."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def sees(self) -> Space:  # type: ignore[override]
        return gridviews.space(self)

    @property
    def takes(self) -> Space:  # type: ignore[override]
        return Discrete(len(MOVES))

    def made(self, number: int) -> Level:
        """Level `number`."""
        return level(self.layout, self.size, self.objects, self.density, number)

    # -------------------------------------------------------------- moving

    def start(self, draws: Draws) -> State:
        if self.level is not None:
            numbers = np.full(len(draws.seeds), self.level, np.int64)
        elif self.levels is not None:
            numbers = draws.of("level").below(self.levels)
        else:
            numbers = draws.seeds.astype(np.int64)
        made = [self.made(number) for number in numbers.tolist()]
        at = np.array([one.start for one in made])
        state = {
            "level": numbers,
            "at": at,
            "present": np.ones((len(at), self.objects), bool),
            "places": np.stack([one.places for one in made]),
            "next": np.stack([one.next for one in made]),
            "walls": np.stack([one.walls for one in made]),
            "holes": np.stack([one.holes for one in made]),
            "covered": np.zeros((len(at), self.cells), bool),
            "time": np.zeros(len(at), np.int64),
            "stray": draws.below(self.cells),
            "noise": draws.below(4, self.distractors)
            if self.distractors
            else np.zeros((len(at), 0), np.int64),
        }
        return state | {"covered": self._cover(state)}

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        rows = np.arange(len(actions))
        if self.slip:
            aside = np.where(draws.chance(0.5), 1, -1) * draws.chance(self.slip)
            actions = (actions + aside) % len(MOVES)
        at = state["next"][rows, state["at"], actions]
        found = state["present"] & (state["places"] == at[:, None])
        kinds = self.kinds
        ended = state["holes"][rows, at]
        if any(self.ends):
            ends = np.asarray(self.ends)[kinds]
            ended = ended | (found & (draws.uniform(self.objects) < ends)).any(-1)
        present = state["present"] & ~found
        if any(self.returns):
            back = draws.uniform(self.objects) < np.asarray(self.returns)[kinds]
            present = present | (back & ~found)
        pays = np.asarray(self.pays)[kinds]
        moved = state | {"at": at, "present": present, "time": state["time"] + 1}
        moved["covered"] = self._cover(moved)
        if self.distractors:
            moved["stray"] = state["next"][rows, state["stray"], draws.below(4)]
            moved["noise"] = draws.below(4, self.distractors)
        fresh = ((moved["covered"] & ~state["covered"]) * self.ground).sum(-1) / self.ground.sum()
        alone = (self._near @ self.ground)[at] / self.ground.sum()
        earned = {"objects": (found * pays).sum(-1), "coverage": fresh, "modular": alone}[self.reward]
        success = (found & (pays > 0)).any(-1).astype(np.float64)
        signals = {"success": success, "covered": fresh, "alone": alone}
        return Moved(moved, earned - self.cost, ended, signals)

    def signals(self) -> frozenset[str] | None:
        return frozenset({"reward", "success", "covered", "alone"})

    def look(self, state: State) -> Array:
        return gridviews.look(self, state)

    def key(self, state: State) -> Array | None:
        """Level, place and what is left."""
        bits = (state["present"] << np.arange(self.objects)).sum(-1)
        number: Array = (state["level"] << (self.objects + 12)) + bits * self.cells + state["at"]
        return number

    def picture(self, state: State, size: int = 240) -> Array:
        return gridviews.picture(self, state, size)

    # -------------------------------------------------------------- coverage

    @functools.cached_property
    def ground(self) -> Array:
        """The density of each cell: a floor, and a peak in the middle."""
        rows, columns = np.divmod(np.arange(self.cells), self.size)
        middle = (self.size - 1) / 2
        square = (rows - middle) ** 2 + (columns - middle) ** 2
        return 0.1 + np.exp(-square / (2 * (self.size / 5) ** 2))

    @functools.cached_property
    def _near(self) -> Array:
        """[cells, cells]: which cells are covered from a cell."""
        rows, columns = np.divmod(np.arange(self.cells), self.size)
        near: Array = np.abs(rows[:, None] - rows) + np.abs(columns[:, None] - columns) <= 1
        return near

    def _cover(self, state: State) -> Array:
        seen: Array = state["covered"] | self._near[state["at"]]
        return seen

    # -------------------------------------------------------------- expert and model

    def expert(self, state: State) -> Array:
        """The shortest way to the nearest object that pays and is left."""
        if not self.objects:
            raise PanoplyError("A grid without objects has no expert.")
        rows = np.arange(len(state["at"]))
        distance = np.stack([self.made(number).distance for number in state["level"].tolist()])
        wanted = state["present"] & (np.asarray(self.pays)[self.kinds] > 0)
        far = np.where(wanted[:, :, None] & (distance >= 0), distance, np.inf)
        nearest = far[rows, :, state["at"]].argmin(-1)
        ways = far[rows, nearest][rows[:, None], state["next"][rows, state["at"]]]
        best: Array = ways.argmin(-1)
        return best

    @property
    def mdp(self) -> MDP:
        """The exact model of the fixed level. States: place + cells · which objects are left, then the end."""
        if "model" not in self.access:
            raise PanoplyError(
                "An exact model needs a fixed grid.level, objects that stay away, and their reward."
            )
        return _model(self)


@functools.lru_cache(maxsize=16)
def _model(world: Grid) -> MDP:
    one, kinds = world.made(world.level or 0), world.kinds
    subsets, end = 1 << world.objects, world.cells << world.objects
    transitions = np.zeros((end + 1, len(MOVES), end + 1))
    rewards = np.zeros_like(transitions)
    for left in range(subsets):
        for at in range(world.cells):
            for action in range(len(MOVES)):
                for turn, chance in ((0, 1 - world.slip), (1, world.slip / 2), (-1, world.slip / 2)):
                    to = int(one.next[at, (action + turn) % len(MOVES)])
                    found = [i for i in range(world.objects) if left >> i & 1 and one.places[i] == to]
                    pays = sum(world.pays[kinds[i]] for i in found) - world.cost
                    after = left & ~sum(1 << i for i in found)
                    over = 1.0 if one.holes[to] else max((world.ends[kinds[i]] for i in found), default=0.0)
                    for goal, share in ((end, over), (to + world.cells * after, 1 - over)):
                        _add(
                            transitions,
                            rewards,
                            (at + world.cells * left, action, goal),
                            chance * share,
                            pays,
                        )
    transitions[end, :, end] = 1
    start = np.zeros(end + 1)
    start[one.start + world.cells * (subsets - 1)] = 1
    return MDP(transitions, rewards, start, np.arange(end + 1) == end)


def _add(transitions: Array, rewards: Array, at: tuple[int, int, int], chance: float, pays: float) -> None:
    """Add a way of getting from one state to another; the reward of a transition is the mean over its ways."""
    if chance:
        total = transitions[at] + chance
        rewards[at] += (pays - rewards[at]) * chance / total
        transitions[at] = total
