"""A car in a valley whose motor is too weak for the hill: it must swing to get out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from panoply.registry import world
from panoply.worlds.control.drawing import FAINT, GREEN, INK, RED, Canvas
from panoply.worlds.control.physical import Physical
from panoply.worlds.control.simulated import Draws, Moved, State
from panoply.worlds.control.world import Array, Box, Discrete, Space

LEFT, RIGHT, FASTEST = -1.2, 0.6, 0.07


@world("mountaincar@1")
@dataclass(frozen=True)
class Mountaincar(Physical):
    """Drive out of a valley with a motor too weak for the hill. Seen: position and velocity.

    Gymnasium's MountainCar-v0 in array operations: actions left, none, right; −1 a step, 200 steps. With `continuous`
    its MountainCarContinuous-v0: a force within ±1, reward −0.1 force² and 100 at the goal, 999 steps.
    """

    continuous: bool = False
    gravity: float = 0.0025
    power: float | None = None
    """Of the motor; 0.001, or 0.0015 where continuous."""
    horizon: int | None = None
    """200 steps, or 999 where continuous."""

    bounds: ClassVar[Mapping[str, str]] = {
        "gravity": "at least 0",
        "power": "above 0",
        "horizon": "from 1 to 10000000",
    }

    constants: ClassVar[tuple[str, ...]] = ("gravity", "power")
    sees = Box((2,), (LEFT, -FASTEST), (RIGHT, FASTEST))

    def __post_init__(self) -> None:
        super().__post_init__()
        usual = {"power": 0.0015, "horizon": 999} if self.continuous else {"power": 0.001, "horizon": 200}
        for option, value in usual.items():
            if getattr(self, option) is None:
                object.__setattr__(self, option, value)

    @property
    def takes(self) -> Space:  # type: ignore[override]
        return Box((1,), (-1.0,), (1.0,)) if self.continuous else Discrete(3)

    @property
    def solved(self) -> float | None:  # type: ignore[override]
        return 90.0 if self.continuous else -110.0

    def start(self, draws: Draws) -> State:
        x = draws.uniform(low=-0.6, high=-0.4)
        return {"x": x, "velocity": np.zeros_like(x)}

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        gravity, power = (self.constant(state, name) for name in self.constants)
        force = np.clip(actions[:, 0], -1.0, 1.0) if self.continuous else actions - 1.0
        push = (force + state.get("push", 0.0)) * power
        velocity = np.clip(state["velocity"] + push - gravity * np.cos(3 * state["x"]), -FASTEST, FASTEST)
        x = np.clip(state["x"] + velocity, LEFT, RIGHT)
        velocity = np.where((x == LEFT) & (velocity < 0), 0.0, velocity)
        out = (x >= (0.45 if self.continuous else 0.5)) & (velocity >= 0)
        reward = 100.0 * out - 0.1 * actions[:, 0] ** 2 if self.continuous else np.full(len(x), -1.0)
        return Moved({"x": x, "velocity": velocity}, reward, out)

    def look(self, state: State) -> Array:
        return np.stack([state["x"], state["velocity"]], -1, dtype=np.float32, casting="same_kind")

    def expert(self, state: State) -> Array:
        """Push the way the car already rolls, half as hard where force costs; at rest, down the slope."""
        x, velocity = state["x"], state["velocity"]
        right = (velocity > 0) | ((velocity == 0) & (x < -math.pi / 6))
        return np.where(right, 0.5, -0.5)[:, None] if self.continuous else np.where(right, 2, 0)

    def picture(self, state: State, size: int = 240) -> Array:
        sheet = Canvas(size, (LEFT, RIGHT), (-0.1, 1.2))
        line = np.linspace(LEFT, RIGHT, 100)
        hill = np.stack([line, _height(line)], -1)
        sheet.shape([*hill, (RIGHT, -0.1), (LEFT, -0.1)], FAINT)
        goal = 0.45 if self.continuous else 0.5
        top = _height(goal) + 0.15
        sheet.line([(goal, top - 0.15), (goal, top)], INK, 0.012)
        sheet.shape([(goal, top), (goal, top - 0.06), (goal + 0.08, top - 0.03)], GREEN)
        x = float(state["x"][0])
        sheet.disc((x, _height(x) + 0.05), 0.05, RED)
        return sheet.pixels()


def _height(x: Any) -> Any:
    return np.sin(3 * x) * 0.45 + 0.5
