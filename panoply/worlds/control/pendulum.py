"""A pendulum to be swung up and held there by a motor too weak to lift it at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from panoply.registry import world
from panoply.worlds.control.drawing import BLUE, FAINT, GOLD, INK, RED, Canvas
from panoply.worlds.control.physical import Physical
from panoply.worlds.control.simulated import Draws, Moved, State
from panoply.worlds.control.world import Array, Box

STEP, FASTEST, TORQUE = 0.05, 8.0, 2.0


@world("pendulum@1")
@dataclass(frozen=True)
class Pendulum(Physical):
    """Swing a pendulum up and hold it: reward −(angle² + 0.1 spin² + 0.001 torque²), 200 steps.

    Gymnasium's Pendulum-v1 in array operations: the observation is cosine, sine, spin; the torque is within ±2. The
    angle is 0 upright. A return of −200 is good, −150 about the best that is possible on average.
    """

    gravity: float = 10.0
    mass: float = 1.0
    length: float = 1.0
    horizon: int | None = 200

    bounds: ClassVar[Mapping[str, str]] = {
        "gravity": "at least 0",
        "mass": "above 0",
        "length": "above 0",
        "horizon": "from 1 to 10000000",
    }

    constants: ClassVar[tuple[str, ...]] = ("gravity", "mass", "length")
    solved = -200.0
    sees = Box((3,), (-1.0, -1.0, -FASTEST), (1.0, 1.0, FASTEST))
    takes = Box((1,), (-TORQUE,), (TORQUE,))

    def start(self, draws: Draws) -> State:
        angle, spin = draws.uniform(2, low=-1.0, high=1.0).T
        return {"angle": math.pi * angle, "spin": spin, "torque": np.zeros_like(spin)}

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        gravity, mass, length = (self.constant(state, name) for name in self.constants)
        torque = np.minimum(np.maximum(actions[:, 0], -TORQUE), TORQUE)
        angle, spin = state["angle"], state["spin"]
        cost = wrapped(angle) ** 2 + 0.1 * spin**2 + 0.001 * torque**2
        twist = torque + state.get("push", 0.0)
        turning = 3 * gravity / (2 * length) * np.sin(angle) + 3 / (mass * length**2) * twist
        spin = np.minimum(np.maximum(spin + turning * STEP, -FASTEST), FASTEST)
        moved = {"angle": angle + spin * STEP, "spin": spin, "torque": torque}
        return Moved(moved, -cost, np.zeros(len(cost), bool))

    def look(self, state: State) -> Array:
        seen = np.empty((len(state["angle"]), 3), np.float32)
        seen[:, 0], seen[:, 1], seen[:, 2] = np.cos(state["angle"]), np.sin(state["angle"]), state["spin"]
        return seen

    def expert(self, state: State) -> Array:
        """Pump energy until it suffices for the top, then hold there by a linear controller."""
        angle, spin = wrapped(state["angle"]), state["spin"]
        missing = -(spin**2 / 2 + 3 * self.gravity / (2 * self.length) * (np.cos(angle) - 1))
        pump = np.where(spin >= 0, 1.0, -1.0) * missing
        hold = -(10.0 * angle + 2.5 * spin) * self.mass * self.length**2
        near = np.abs(angle + 0.25 * spin) < 0.5
        return np.clip(np.where(near, hold, pump), -TORQUE, TORQUE)[:, None]

    def picture(self, state: State, size: int = 240) -> Array:
        sheet = Canvas(size, (-1.4, 1.4), (-1.4, 1.4))
        angle, torque = float(state["angle"][0]), float(state["torque"][0])
        sheet.disc((0, 0), 1.2, FAINT)
        sheet.disc((0, 0), 1.18, "#f7f6f2")
        sheet.rod((0, 0), (-math.sin(angle), math.cos(angle)), BLUE, 0.18)
        sheet.disc((-math.sin(angle), math.cos(angle)), 0.16, GOLD)
        sheet.arrow((0, -1.3), (-torque / 2, 0), RED, 0.05)
        sheet.disc((0, 0), 0.06, INK)
        return sheet.pixels()


def wrapped(angle: Array) -> Array:
    """The same direction within ±π."""
    turned: Array = (angle + math.pi) % (2 * math.pi) - math.pi
    return turned
