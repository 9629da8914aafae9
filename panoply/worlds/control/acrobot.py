"""Two links on a joint, of which only the lower is driven: swing the tip up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from panoply.registry import world
from panoply.worlds.control.drawing import BLUE, FAINT, GOLD, INK, Canvas
from panoply.worlds.control.pendulum import wrapped
from panoply.worlds.control.physical import Physical
from panoply.worlds.control.simulated import Draws, Moved, State
from panoply.worlds.control.world import Array, Box, Discrete

STEP = 0.2
FASTEST = (4 * math.pi, 9 * math.pi)
HIGH = (1.0, 1.0, 1.0, 1.0, *FASTEST)


@world("acrobot@1")
@dataclass(frozen=True)
class Acrobot(Physical):
    """Swing the tip of a two-link arm above a line with torques −1, 0, 1 on the middle joint; −1 a step.

    Gymnasium's Acrobot-v1 in array operations: the observation is cosine and sine of both angles and the two
    velocities. The centre of mass of a link is in its middle; moments of inertia are 1.
    """

    gravity: float = 9.8
    upper: float = 1.0
    lower: float = 1.0
    """Masses of the links."""
    length: float = 1.0
    """Of the upper link."""
    horizon: int | None = 500

    bounds: ClassVar[Mapping[str, str]] = {
        "gravity": "at least 0",
        "upper": "above 0",
        "lower": "above 0",
        "length": "above 0",
        "horizon": "from 1 to 10000000",
    }

    constants: ClassVar[tuple[str, ...]] = ("gravity", "upper", "lower", "length")
    solved = -100.0
    sees = Box((6,), tuple(-h for h in HIGH), HIGH)
    takes = Discrete(3)

    def start(self, draws: Draws) -> State:
        return {"joints": draws.uniform(4, low=-0.1, high=0.1)}

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        """Sutton and Barto's equations by one step of the fourth-order Runge–Kutta method."""
        gravity, upper, lower, length = (self.constant(state, name) for name in self.constants)
        torque = actions - 1.0 + state.get("push", 0.0)
        body = (torque, gravity, upper, lower, length)
        at = state["joints"].T
        k1 = _slope(at, *body)
        k2 = _slope(at + STEP / 2 * k1, *body)
        k3 = _slope(at + STEP / 2 * k2, *body)
        k4 = _slope(at + STEP * k3, *body)
        first, second, spin1, spin2 = at + STEP / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        spin1, spin2 = np.clip(spin1, -FASTEST[0], FASTEST[0]), np.clip(spin2, -FASTEST[1], FASTEST[1])
        joints = np.stack([wrapped(first), wrapped(second), spin1, spin2], -1)
        high = -np.cos(first) - np.cos(first + second) > 1.0
        return Moved({"joints": joints}, np.where(high, 0.0, -1.0), high)

    def look(self, state: State) -> Array:
        first, second, spin1, spin2 = state["joints"].T
        columns = [np.cos(first), np.sin(first), np.cos(second), np.sin(second), spin1, spin2]
        return np.stack(columns, -1, dtype=np.float32, casting="same_kind")

    def expert(self, state: State) -> Array:
        """Push the way the joint between the links already bends, which pumps energy into the swing."""
        _, _, spin1, spin2 = state["joints"].T
        return np.where(spin2 >= spin1, 2, 0)

    def picture(self, state: State, size: int = 240) -> Array:
        sheet = Canvas(size, (-2.4, 2.4), (-2.4, 2.4))
        first, second = state["joints"][0, :2]
        knee = (math.sin(first), -math.cos(first))
        tip = (knee[0] + math.sin(first + second), knee[1] - math.cos(first + second))
        sheet.line([(-2.4, 1), (2.4, 1)], FAINT, 0.04)
        sheet.rod((0, 0), knee, BLUE, 0.2)
        sheet.rod(knee, tip, GOLD, 0.2)
        for joint in ((0.0, 0.0), knee):
            sheet.disc(joint, 0.08, INK)
        return sheet.pixels()


def _slope(at: Array, torque: Any, gravity: Any, upper: Any, lower: Any, length: Any) -> Array:
    """Time derivatives of angles and velocities. `middle` is half a link: where its mass is."""
    first, second, spin1, spin2 = at
    middle = 0.5
    sin, cos = np.sin(second), np.cos(second)
    couple = lower * length * middle
    d1 = upper * middle**2 + lower * (length**2 + middle**2 + 2 * length * middle * cos) + 2
    d2 = lower * middle**2 + couple * cos + 1
    phi2 = lower * middle * gravity * np.sin(first + second)
    phi1 = (
        -couple * spin2**2 * sin
        - 2 * couple * spin2 * spin1 * sin
        + (upper * middle + lower * length) * gravity * np.sin(first)
        + phi2
    )
    turn2 = (torque + d2 / d1 * phi1 - couple * spin1**2 * sin - phi2) / (lower * middle**2 + 1 - d2**2 / d1)
    return np.stack([spin1, spin2, -(d2 * turn2 + phi1) / d1, turn2])
