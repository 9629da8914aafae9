"""Control on this machine's CPU at equal work: Stable-Baselines3 2.9, d3rlpy 2.8 and Panoply, cell by cell.

    python -m benchmarks.control                              all cells that have no result yet, then the tables
    python -m benchmarks.control --only ppo-cartpole          some pairs
    python -m benchmarks.control --cell ppo-cartpole panoply speed 0    one cell
    python -m benchmarks.control --again                      measure once more

Both sides step the same Gymnasium environments (`gymnasium.make` without its checker), with the same networks, batches
and epochs, on one thread each. A cell is a process of its own and a file under results/bench-control. Cells of `speed`
time the first steps of learning and take turns between the sides; cells of `return` learn to the end, and their
policies are judged on the same starts. Only learning is timed: no imports, evaluations or checkpoints, on either side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

RESULTS = Path("results/bench-control")
EPISODES = 20
"""Greedy episodes by which both sides' policies are judged."""
REPEATS = {"speed": 5, "return": 2}


@dataclass(frozen=True)
class Pair:
    """One line of the table: the same work on both sides, and how much faster Panoply has promised to be."""

    title: str
    other: str
    env: str
    timed: int
    """Steps (of the environment, or of the optimiser where data is given) whose time is taken."""
    steps: int
    """Steps after which the policies are judged."""
    promise: float
    sides: tuple[str, ...] = ("other", "panoply")
    flops: float = 0.0
    """Of the matrix products of one step, acting and learning."""
    acts: bool = True
    warmup: int = 0
    """Steps before the first update."""


def mlp(*sizes: int) -> float:
    """Operations of a forward pass of one row."""
    return 2.0 * sum(a * b for a, b in pairwise(sizes))


def ppo_flops(seen: int, out: int, epochs: int) -> float:
    """A step is acted on and valued once, and learned from `epochs` times, forwards and backwards."""
    policy, value = mlp(seen, 64, 64, out), mlp(seen, 64, 64, 1)
    return (1 + 3 * epochs) * (policy + value) - epochs * 2 * 2 * seen * 64


POLICY, CRITIC, STATE = mlp(3, 256, 256, 2), mlp(4, 256, 256, 1), mlp(3, 256, 256, 1)
PAIRS = {
    "ppo-cartpole": Pair(
        "PPO, CartPole-v1: 8 environments × 32 steps, 20 epochs of 256 (RL Baselines3 Zoo)",
        "SB3", "CartPole-v1", 25_600, 100_096, 1.7, ("other", "compiled", "panoply"), ppo_flops(4, 2, 20),
    ),
    "ppo-cartpole-defaults": Pair(
        "PPO, CartPole-v1, SB3's defaults: 2,048 steps, 10 epochs of 64",
        "SB3", "CartPole-v1", 8_192, 20_480, 1.7, flops=ppo_flops(4, 2, 10),
    ),
    "ppo-halfcheetah": Pair(
        "PPO, HalfCheetah-v5, SB3's defaults",
        "SB3", "HalfCheetah-v5", 4_096, 20_480, 1.0, flops=ppo_flops(17, 6, 10),
    ),
    "sac-pendulum": Pair(
        "SAC, Pendulum-v1: an update of 256 after every step, two layers of 256",
        "SB3", "Pendulum-v1", 700, 5_000, 1.4, flops=256 * (4 * POLICY + 12 * CRITIC), warmup=100,
    ),
    "iql-pendulum": Pair(
        "IQL, logged:pendulum-mixed: updates of 256, two layers of 256",
        "d3rlpy", "Pendulum-v1", 500, 3_000, 2.0, flops=256 * (3 * POLICY + 4 * STATE + 8 * CRITIC), acts=False,
    ),
}  # fmt: skip


def judged(act: Callable[[Any], Any], env: str) -> float:
    """The mean return of greedy episodes from the same starts."""
    import gymnasium

    made, returns = gymnasium.make(env, disable_env_checker=True), []
    for seed in range(EPISODES):
        seen, _ = made.reset(seed=10_000 + seed)
        total, over = 0.0, False
        while not over:
            seen, reward, terminated, truncated, _ = made.step(act(seen))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return statistics.mean(returns)


# ------------------------------------------------------------------ one cell


def run_cell(name: str, side: str, kind: str, seed: int, steps: int | None = None) -> dict[str, Any]:
    """What one side takes, or gets to; of the side `floor`, what nobody can do without."""
    from benchmarks import control_sides as sides

    pair = PAIRS[name]
    count = steps or (pair.timed if kind == "speed" else pair.steps)
    if side == "floor":
        return {"steps": count, **sides.floor(pair.env if pair.acts else None, count)}
    runner = sides.PANOPLY if side == "panoply" else sides.OTHERS
    spent, act = runner[name](pair.env, count, seed, **({"compiled": True} if side == "compiled" else {}))
    return {"steps": count, **spent, **({"return": judged(act, pair.env)} if kind == "return" else {})}


def cells(names: list[str]) -> list[tuple[str, str, str, int]]:
    """Sides take turns, so that what else the machine does meets all of them."""
    found = []
    for name in names:
        found.append((name, "floor", "speed", 0))
        for kind in ("speed", "return"):
            for seed in range(REPEATS[kind]):
                sides = [s for s in PAIRS[name].sides if s != "compiled" or (kind, seed) == ("speed", 0)]
                found += [(name, side, kind, seed) for side in sides]
    return found


def place(name: str, side: str, kind: str, seed: int) -> Path:
    return RESULTS / f"{name}.{side}.{kind}-{seed}.json"


def store(name: str, side: str, kind: str, seed: int, steps: int | None) -> None:
    import torch

    facts = {**run_cell(name, side, kind, seed, steps), "torch": torch.__version__, "cores": os.cpu_count()}
    facts |= {"date": time.strftime("%Y-%m-%d"), "load": round(os.getloadavg()[0], 2)}
    RESULTS.mkdir(parents=True, exist_ok=True)
    place(name, side, kind, seed).write_text(json.dumps(facts, indent=1))


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--kind", choices=["speed", "return"], help="cells of one kind")
    parser.add_argument("--again", action="store_true", help="measure cells that have a result, too")
    parser.add_argument("--cell", nargs=4, metavar=("PAIR", "SIDE", "KIND", "SEED"))
    parser.add_argument("--steps", type=int, help="fewer steps, with --cell")
    chosen = parser.parse_args(given)
    if chosen.cell:
        name, side, kind, seed = chosen.cell
        store(name, side, kind, int(seed), chosen.steps)
        return
    for cell in cells(chosen.only):
        if chosen.kind not in (None, cell[2]) or (place(*cell).is_file() and not chosen.again):
            continue
        print(f"measuring {' '.join(map(str, cell))} …", flush=True)
        command = [sys.executable, "-m", "benchmarks.control", "--cell", *map(str, cell)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, cell))} failed:\n{done.stderr[-2000:]}")
    from benchmarks.control_table import section

    print(section(RESULTS))


if __name__ == "__main__":
    main()
