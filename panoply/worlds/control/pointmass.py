"""A point in the plane: reach, push, find ways around walls, choose among goals, keep out of danger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import numpy as np

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.worlds.control.arenas import WALLS, Arena, aim, blocked, slide
from panoply.worlds.control.drawing import BLUE, FAINT, GOLD, GREEN, INK, RED, Canvas
from panoply.worlds.control.physical import Physical
from panoply.worlds.control.simulated import Draws, Moved, State
from panoply.worlds.control.world import Array, Box, Space

Variant = Literal["reach", "push", "umaze", "rooms", "routes", "goals"]
TOUCH = 0.18
"""From the middle of the agent to that of the puck."""


@world("pointmass@1")
@dataclass(frozen=True)
class Pointmass(Physical):
    """Steer a point in a square from −1 to 1; an action is a direction of at most 1 in each coordinate.

    - `reach`: from near the middle to a goal in some direction, within `sector` degrees of the right.
    - `push`: a puck to the goal, by running into it.
    - `umaze`, `rooms`: around a wall; through the doors of four rooms.
    - `routes`: around a block, above it (shorter) or below. The expert's way is drawn: above with `upper`.
    - `goals`: any of `goals` on a circle; the expert's is drawn.

    Seen: place, velocity, the goal (of `goals`, none), the puck, then the context. Within 0.1 of the goal the episode
    ends. `dense` pays minus the distance a step, `sparse` 1 at the end, `episodic` all of the dense reward in the last
    step. `hazard` is the radius of a danger between start and goal that costs (signal `cost`) and, if `fatal`, ends
    the episode. One of `contexts` turns all actions by an angle of its own, and is seen.

    Signals: `success`, `cost`, `goal` (the number of the one reached, from 1).
    """

    variant: Variant = "reach"
    reward: Literal["dense", "sparse", "episodic"] = "dense"
    speed: float = 0.1
    """How far a step reaches."""
    inertia: float = 0.0
    """Share of the velocity that is kept, from 0 (steps) to below 1."""
    sector: float = 360.0
    goals: int = 6
    upper: float = 0.5
    hazard: float = 0.0
    fatal: bool = False
    contexts: int = 1
    distractors: int = 0
    """Numbers of noise at the end of the observation."""
    horizon: int | None = 60

    bounds: ClassVar[Mapping[str, str]] = {
        "speed": "above 0",
        "inertia": "from 0 up to 1",
        "sector": "from 0 to 360",
        "goals": "from 1 to 100000",
        "upper": "from 0 to 1",
        "hazard": "at least 0",
        "contexts": "from 1 to 100000",
        "distractors": "from 0 to 100000",
        "horizon": "from 1 to 10000000",
    }

    constants: ClassVar[tuple[str, ...]] = ("speed", "inertia")
    pushes: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speed > 0.12:
            raise PanoplyError(f"pointmass.speed is above 0 and at most 0.12, not {self.speed:g}.")

    @property
    def arena(self) -> Arena:
        return cast(Arena, self.variant) if self.variant in WALLS else "open"

    @property
    def sees(self) -> Space:  # type: ignore[override]
        return Box(
            (4 + 2 * len(self._shown()) + (self.contexts if self.contexts > 1 else 0) + self.distractors,)
        )

    @property
    def takes(self) -> Space:  # type: ignore[override]
        return Box((2,), (-1.0, -1.0), (1.0, 1.0))

    def _shown(self) -> tuple[str, ...]:
        return {"goals": (), "push": ("goal", "puck")}.get(self.variant, ("goal",))

    # -------------------------------------------------------------- moving

    def start(self, draws: Draws) -> State:
        rows = len(draws.seeds)
        at, goal = self._ends(draws)
        puck = np.full((rows, 2), 2.0)  # far away, where there is none
        if self.variant == "push":
            puck = draws.uniform(2, low=-0.4, high=0.4)
            at = np.where((np.abs(at - puck) < TOUCH).all(-1)[:, None], at + 2.5 * TOUCH, at)
        state = {
            "at": at,
            "velocity": np.zeros((rows, 2)),
            "goal": goal,
            "puck": puck,
            "danger": (at + goal) / 2,
            "choice": self._choice(draws),
            "context": draws.below(self.contexts),
            "owed": np.zeros(rows),
        }
        return state | {"noise": draws.normal(self.distractors)} if self.distractors else state

    def _ends(self, draws: Draws) -> tuple[Array, Array]:
        """Where an episode starts, and its goal."""
        near, jitter = draws.uniform(2, low=-0.1, high=0.1), draws.uniform(2, low=-0.1, high=0.1)
        if self.variant == "umaze":
            return near - np.array([0.7, 0.6]), jitter - np.array([0.7, -0.6])
        if self.variant == "routes":
            return near - np.array([0.8, 0.0]), jitter + np.array([0.8, 0.0])
        if self.variant == "rooms":
            at, goal = (self._free(draws.uniform(2, low=-0.9, high=0.9)) for _ in range(2))
            return at, goal
        if self.variant == "goals":
            return near, np.zeros_like(near)
        turn = np.radians(self.sector) * draws.uniform(low=-0.5, high=0.5)
        far = draws.uniform(low=0.5, high=0.9)
        return near, np.stack([far * np.cos(turn), far * np.sin(turn)], -1)

    def _free(self, points: Array) -> Array:
        """Points in or near a wall are moved into the middle of their room."""
        return np.where(blocked(self.arena, points, 0.06)[:, None], np.where(points > 0, 0.5, -0.5), points)

    def _choice(self, draws: Draws) -> Array:
        """What the expert of this episode wants: a goal's number, or 0 above and 1 below the block."""
        if self.variant == "goals":
            return draws.below(self.goals)
        return np.where(draws.chance(self.upper), 0, 1)

    @property
    def circle(self) -> Array:
        """The goals of `goals`."""
        turns = 2 * np.pi * np.arange(self.goals) / self.goals
        return 0.8 * np.stack([np.cos(turns), np.sin(turns)], -1)

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        speed, inertia = (np.asarray(self.constant(state, name))[..., None] for name in self.constants)
        wanted = self._turned(np.clip(actions, -1.0, 1.0), state["context"]) + state.get("push", 0.0)
        velocity = inertia * state["velocity"] + (1 - inertia) * speed * wanted
        at = slide(self.arena, state["at"], velocity)
        puck = self._pushed(state["puck"], at)
        moved = state | {"at": at, "velocity": at - state["at"], "puck": puck}
        if self.distractors:
            moved["noise"] = draws.normal(self.distractors)
        distance, which = self._left(moved)
        success = distance < 0.1
        in_danger = np.hypot(*(at - state["danger"]).T) < self.hazard
        ended = success | (in_danger if self.fatal else False)
        moved["owed"] = state["owed"] - distance
        last = ended | (False if self.horizon is None else draws.clock >= np.asarray(self.horizon))
        earned = {
            "dense": -distance,
            "sparse": success.astype(np.float64),
            "episodic": np.where(last, moved["owed"], 0.0),
        }[self.reward]
        signals = {"success": success.astype(np.float64), "cost": in_danger.astype(np.float64)}
        return Moved(moved, earned, ended, signals | {"goal": np.where(success, which + 1.0, 0.0)})

    def signals(self) -> frozenset[str] | None:
        return frozenset({"reward", "success", "cost", "goal"})

    def _turned(self, actions: Array, context: Array, back: bool = False) -> Array:
        if self.contexts == 1:
            return actions
        turn = 2 * np.pi * context / self.contexts * (-1 if back else 1)
        (x, y), sin, cos = actions.T, np.sin(turn), np.cos(turn)
        return np.stack([cos * x - sin * y, sin * x + cos * y], -1)

    def _pushed(self, puck: Array, at: Array) -> Array:
        """The puck gives way, straight away from the agent."""
        if self.variant != "push":
            return puck
        apart = puck - at
        distance = np.hypot(*apart.T)[:, None]
        away = apart / np.maximum(distance, 1e-9)
        return np.clip(np.where(distance < TOUCH, at + TOUCH * away, puck), -0.95, 0.95)

    def _left(self, state: State) -> tuple[Array, Array]:
        """How far the goal is, from the agent or the puck, and the number of the nearest."""
        if self.variant == "goals":
            apart = np.hypot(*(state["at"][:, None] - self.circle).transpose(2, 0, 1))
            return apart.min(-1), apart.argmin(-1)
        moving = state["puck"] if self.variant == "push" else state["at"]
        return np.hypot(*(moving - state["goal"]).T), np.zeros(len(moving), np.int64)

    def look(self, state: State) -> Array:
        columns = [state["at"], state["velocity"], *(state[name] for name in self._shown())]
        if self.contexts > 1:
            columns.append(np.eye(self.contexts)[state["context"]])
        if self.distractors:
            columns.append(state["noise"])
        return np.concatenate(columns, 1).astype(np.float32)

    # -------------------------------------------------------------- expert

    def expert(self, state: State) -> Array:
        """Straight to the next point in sight of a shortest way; behind the puck first, to push it."""
        at = state["at"]
        if self.variant == "goals":
            target = self.circle[state["choice"]]
        elif self.variant == "push":
            target = _behind(at, state["puck"], state["goal"])
        elif self.variant == "routes":
            above, below = (aim(way, at, state["goal"]) for way in ("upper", "lower"))
            target = np.where((state["choice"] == 0)[:, None], above, below)
        else:
            target = aim(self.arena, at, state["goal"])
        speed, inertia = (np.asarray(self.constant(state, name))[..., None] for name in self.constants)
        wanted = (target - at - inertia * state["velocity"]) / ((1 - inertia) * speed)
        length = np.maximum(np.abs(wanted).max(-1, keepdims=True), 1.0)
        return self._turned(wanted / length, state["context"], back=True).clip(-1.0, 1.0)

    def picture(self, state: State, size: int = 240) -> Array:
        sheet = Canvas(size, (-1.05, 1.05), (-1.05, 1.05))
        for left, bottom, right, top in WALLS[self.arena]:
            sheet.box((left, bottom), (right, top), INK)
        for goal in self.circle if self.variant == "goals" else state["goal"][:1]:
            sheet.disc(goal, 0.1, GREEN)
        if self.hazard:
            sheet.disc(state["danger"][0], self.hazard, RED)
        if self.variant == "push":
            sheet.disc(state["puck"][0], 0.1, BLUE, INK)
        sheet.arrow(state["at"][0], 2.5 * state["velocity"][0], FAINT, 0.03)
        sheet.disc(state["at"][0], 0.06, GOLD, INK)
        return sheet.pixels()


def _behind(at: Array, puck: Array, goal: Array) -> Array:
    """Where to head for to push a puck: to the side of it that is away from the goal, around it, then through it."""
    ahead = goal - puck
    ahead = ahead / np.maximum(np.hypot(*ahead.T), 1e-9)[:, None]
    side = np.stack([-ahead[:, 1], ahead[:, 0]], -1)
    off = at - puck
    along, across, far = (off * ahead).sum(-1), (off * side).sum(-1), np.hypot(*off.T)
    ready = (along < -0.75 * far) & (far < 1.6 * TOUCH)
    around = puck + side * np.where(across >= 0, 1.6, -1.6)[:, None] * TOUCH
    in_front = (along > -0.3 * TOUCH) & (np.abs(across) < 1.4 * TOUCH)
    waiting = np.where(in_front[:, None], around, puck - ahead * 1.4 * TOUCH)
    return np.where(ready[:, None], puck - ahead * 0.5 * TOUCH, waiting)
