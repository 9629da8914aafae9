"""Steps a second of the batched control worlds, alone, with actions made beforehand.

python benchmarks/control_worlds.py
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from panoply.worlds.control.acrobot import Acrobot
from panoply.worlds.control.bandit import Bandit
from panoply.worlds.control.cartpole import Cartpole
from panoply.worlds.control.grid import Grid
from panoply.worlds.control.inventory import Inventory
from panoply.worlds.control.mountaincar import Mountaincar
from panoply.worlds.control.pendulum import Pendulum
from panoply.worlds.control.pointmass import Pointmass
from panoply.worlds.control.simulated import Simulated
from panoply.worlds.control.tabular import Tabular

WORLDS: dict[str, Simulated] = {
    "cartpole": Cartpole(),
    "pendulum": Pendulum(),
    "acrobot": Acrobot(),
    "mountaincar": Mountaincar(),
    "pointmass": Pointmass(),
    "pointmass, rooms": Pointmass("rooms"),
    "grid, planes": Grid(level=0),
    "grid, pixels": Grid(level=0, view="pixels"),
    "tabular, riverswim": Tabular("riverswim"),
    "bandit": Bandit(),
    "inventory": Inventory(),
}


def rate(world: Simulated, size: int, steps: int = 100, repeats: int = 5) -> float:
    """The median over repeats of steps a second, resets not counted."""
    envs, rows = world.envs(size), np.arange(size)
    found = []
    for repeat in range(repeats):
        envs.reset(rows, rows + repeat * size)
        actions = envs.dynamics.expert(envs.state)
        began = time.perf_counter()
        for _ in range(steps):
            envs.step(actions)
        found.append(size * steps / (time.perf_counter() - began))
    return statistics.median(found)


def main() -> None:
    sizes = (8, 64, 1024)
    print("world".ljust(22), *(f"{n:>12,}" for n in sizes))
    for name, world in WORLDS.items():
        print(name.ljust(22), *(f"{rate(world, n):12,.0f}" for n in sizes), flush=True)


if __name__ == "__main__":
    main()
