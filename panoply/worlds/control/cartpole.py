"""A pole on a cart, to be kept upright by pushing the cart left or right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from panoply.registry import world
from panoply.worlds.control.drawing import BLUE, FAINT, GOLD, INK, Canvas
from panoply.worlds.control.physical import Physical
from panoply.worlds.control.simulated import Draws, Moved, State
from panoply.worlds.control.world import Array, Box, Discrete

TRACK, TILT = 2.4, math.radians(12)
STEP = 0.02
"""Seconds."""


@world("cartpole@1")
@dataclass(frozen=True)
class Cartpole(Physical):
    """Keep a pole upright by pushing its cart left (0) or right (1); 1 for every step it stands.

    Gymnasium's CartPole-v1 in array operations: the observation is position, velocity, angle, angular velocity. An
    episode ends when the pole leans by 12° or the cart leaves ±2.4, and is cut off after 500 steps.
    """

    gravity: float = 9.8
    cart: float = 1.0
    pole: float = 0.1
    half: float = 0.5
    """Half of the pole's length."""
    force: float = 10.0
    horizon: int | None = 500

    bounds: ClassVar[Mapping[str, str]] = {
        "gravity": "at least 0",
        "cart": "above 0",
        "pole": "above 0",
        "half": "above 0",
        "force": "any number",
        "horizon": "from 1 to 10000000",
    }

    constants: ClassVar[tuple[str, ...]] = ("gravity", "cart", "pole", "half", "force")
    solved = 475.0
    sees = Box((4,))
    takes = Discrete(2)

    def start(self, draws: Draws) -> State:
        return {"body": draws.uniform(4, low=-0.05, high=0.05)}

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        """Barto, Sutton and Anderson's equations as Florian (2007) corrects them, one Euler step."""
        gravity, cart, pole, half, force = (self.constant(state, name) for name in self.constants)
        x, velocity, angle, spin = state["body"].T
        push = (2 * actions - 1) * force + state.get("push", 0.0)
        sin, cos = np.sin(angle), np.cos(angle)
        mass, lever = cart + pole, pole * half
        thrust = (push + lever * spin * spin * sin) / mass
        turning = (gravity * sin - cos * thrust) / (half * (4 / 3 - pole / mass * cos * cos))
        moved = np.empty_like(state["body"])
        moved[:, 0] = x + STEP * velocity
        moved[:, 1] = velocity + STEP * (thrust - lever / mass * turning * cos)
        moved[:, 2] = angle + STEP * spin
        moved[:, 3] = spin + STEP * turning
        fallen = (np.abs(moved[:, 0]) > TRACK) | (np.abs(moved[:, 2]) > TILT)
        return Moved({"body": moved}, np.ones(len(x)), fallen)

    def look(self, state: State) -> Array:
        return state["body"].astype(np.float32)

    def expert(self, state: State) -> Array:
        """A linear controller, by its sign."""
        return (state["body"] @ (0.05, 0.1, 1.0, 0.3) > 0).astype(np.int64)

    def picture(self, state: State, size: int = 240) -> Array:
        sheet = Canvas(size, (-TRACK, TRACK), (-0.6, 1.8))
        x, _, angle, _ = state["body"][0].tolist()
        sheet.line([(-TRACK, 0), (TRACK, 0)], FAINT, 0.04)
        sheet.box((x - 0.35, -0.18), (x + 0.35, 0.18), INK, 0.06)
        tip = (x + 2 * self.half * math.sin(angle), 0.1 + 2 * self.half * math.cos(angle))
        sheet.rod((x, 0.1), tip, GOLD, 0.12)
        sheet.disc((x, 0.1), 0.05, BLUE)
        return sheet.pixels()
