"""Steps a second of the batched control worlds, alone, with actions made beforehand.

python -m benchmarks.control_worlds        prints them, and stores them with the results of control.py
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

from benchmarks.control import RESULTS
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
    rates: dict[str, dict[int, float]] = {}
    for name, world in WORLDS.items():
        rates[name] = {n: rate(world, n) for n in sizes}
        print(name.ljust(22), *(f"{found:12,.0f}" for found in rates[name].values()), flush=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    facts = {"rates": rates, "date": time.strftime("%Y-%m-%d"), "numpy": np.__version__}
    (RESULTS / "worlds.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
