"""Control on this machine's CPU at equal work: Stable-Baselines3 2.9 and Panoply in one go.

    python benchmarks/control.py                      all cells, then the table (make bench-control)
    python benchmarks/control.py --only ppo-cartpole  one pair of cells

Both sides step the same Gymnasium environment objects (`gymnasium.make`), with the same networks, batches, epochs and
number of environment steps, on one thread each. A cell is a process of its own; sides take turns, and the median of the
repeats counts, by the clock and by the processor's own time (the clock also counts what else the machine does). Only
learning is timed: imports, evaluation and checkpoints are left out on both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path("results/bench-control")
EPISODES = 20
"""Greedy episodes by which both sides' policies are judged, on the same environment."""


@dataclass(frozen=True)
class Pair:
    """One line of the table: what both sides do, and how much faster Panoply has promised to be."""

    title: str
    env: str
    steps: int
    sides: dict[str, Callable[[Pair, int], dict[str, Any]]]
    promise: float
    native: bool = False


def judged(act: Callable[[Any], Any], env: str) -> float:
    """The mean return of greedy episodes from the same seeds."""
    import gymnasium

    made, returns = gymnasium.make(env), []
    for seed in range(EPISODES):
        seen, _ = made.reset(seed=10_000 + seed)
        total, over = 0.0, False
        while not over:
            seen, reward, terminated, truncated, _ = made.step(act(seen))
            total, over = total + float(reward), terminated or truncated
        returns.append(total)
    return statistics.mean(returns)


# ------------------------------------------------------------------ PPO

ZOO = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8, "gamma": 0.98}


def sb3_ppo(pair: Pair, seed: int, envs: int, schedule: bool, **settings: Any) -> dict[str, Any]:
    import gymnasium
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    torch.set_num_threads(1)
    batch = DummyVecEnv([lambda: gymnasium.make(pair.env)] * envs)
    if schedule:
        settings["learning_rate"] = lambda left: 1e-3 * left
    model = PPO("MlpPolicy", batch, seed=seed, device="cpu", **settings)
    start, cpu = time.perf_counter(), time.process_time()
    model.learn(pair.steps)
    spent = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
    return {**spent, "return": judged(lambda x: model.predict(x, deterministic=True)[0], pair.env)}


def panoply_ppo(
    pair: Pair, seed: int, world: str | None = None, preset: str | None = None, **settings: Any
) -> dict[str, Any]:
    import panoply as pp
    from panoply.progress import Progress
    from panoply.run import Run

    class Clock(Progress):
        """The processor's time from the end of the first evaluation to the end of the last step."""

        first = last = 0.0

        def evaluated(self, job: Any, found: Any) -> None:
            self.first = self.first or time.process_time()

        def step(self, job: Any, record: Any, experience: Any) -> None:
            self.last = time.process_time()

    common: dict[str, Any] = {"seed": seed, "threads": 1, "preset": preset}
    made = pp.plan("ppo", world or pair.env, settings=settings, **common)
    sample = made.method.slots()["sample"].settings()  # type: ignore[union-attr]
    quiet = {
        "run.evaluate_every": 0,
        "run.held_out": 1,
        "run.episodes_every": 0,
        "run.checkpoint_every": 10**9,
    }
    quiet["run.steps"] = -(-pair.steps // (sample["envs"] * sample["length"]))
    with tempfile.TemporaryDirectory() as folder:
        plan = pp.plan("ppo", world or pair.env, settings={**settings, **quiet}, **common)
        watch = Clock()
        done = pp.train(plan, run=Path(folder) / "run", progress=watch)
        policy = pp.load_policy(Path(folder) / "run" / "checkpoints" / f"step-{plan.options.steps:07d}")
        rows = Run.open(done.run).metrics()
        phases = {k: sum(r.get(k, 0.0) for r in rows) for k in rows[0] if k.startswith("seconds_")}
    spent = {"seconds": done.seconds, "cpu_seconds": watch.last - watch.first}
    return {**spent, "return": judged(greedy(policy), pair.env), "phases": phases}


def greedy(policy: Any) -> Callable[[Any], Any]:
    """A policy's likeliest action for one observation."""
    import numpy as np

    forward = policy.model.numpy()

    def act(seen: Any) -> Any:
        out = forward(np.asarray(seen)[None], np.zeros(1, int))
        noise = np.zeros_like(policy.head.noise(np.random.default_rng(0), 1))
        return policy.head.act(out, noise, None, 0.0).acted[0]

    return act


PAIRS = {
    "ppo-cartpole": Pair(
        "PPO, CartPole-v1, 8 environments × 32 steps, 20 epochs of 256",
        "CartPole-v1",
        100_096,
        {
            "sb3": lambda pair, seed: sb3_ppo(pair, seed, envs=8, schedule=True, **ZOO),
            "panoply": lambda pair, seed: panoply_ppo(pair, seed),
        },
        1.7,
    ),
    "ppo-cartpole-defaults": Pair(
        "PPO, CartPole-v1, SB3's defaults: 2048 steps, 10 epochs of 64",
        "CartPole-v1",
        20_480,
        {
            "sb3": lambda pair, seed: sb3_ppo(pair, seed, envs=1, schedule=False),
            "panoply": lambda pair, seed: panoply_ppo(pair, seed, preset="control"),
        },
        1.7,
    ),
    "ppo-halfcheetah": Pair(
        "PPO, HalfCheetah-v5, SB3's defaults",
        "HalfCheetah-v5",
        20_480,
        {
            "sb3": lambda pair, seed: sb3_ppo(pair, seed, envs=1, schedule=False),
            "panoply": lambda pair, seed: panoply_ppo(pair, seed, preset="control"),
        },
        1.0,
    ),
}

# ------------------------------------------------------------------ SAC and IQL


def off_policy(side: str, method: str, world: str) -> Callable[[Pair, int], dict[str, Any]]:
    """One side of a pair of `control_off_policy.py`."""

    def run(pair: Pair, seed: int) -> dict[str, Any]:
        import control_off_policy as cells

        if side == "panoply":
            seconds, policy, phases = cells.panoply_side(method, world, pair.steps, seed)
            return {"seconds": seconds, "return": judged(greedy(policy), pair.env), "phases": phases}
        seconds, act = (
            cells.sb3_sac(pair.env, pair.steps, seed) if side == "sb3" else cells.d3rlpy_iql(pair.steps, seed)
        )
        return {"seconds": seconds, "return": judged(act, pair.env)}

    return run


PAIRS |= {
    "sac-pendulum": Pair(
        "SAC, Pendulum-v1, an update of 256 after every step",
        "Pendulum-v1",
        5_000,
        {side: off_policy(side, "sac", "Pendulum-v1") for side in ("sb3", "panoply")},
        1.4,
    ),
    "iql-pendulum": Pair(
        "IQL, logged:pendulum-mixed, updates of 256 (against d3rlpy)",
        "Pendulum-v1",
        5_000,
        {side: off_policy(side, "iql", "logged:pendulum-mixed") for side in ("d3rlpy", "panoply")},
        2.0,
    ),
}


# ------------------------------------------------------------------ running


def run_cell(name: str, side: str, seed: int, steps: int | None) -> dict[str, Any]:
    """One side of a pair in a process of its own."""
    command = [sys.executable, __file__, "--cell", name, side, str(seed)]
    command += ["--steps", str(steps)] if steps else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} {side} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def table(found: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    lines = [
        "| | other's steps/s | Panoply steps/s | times | by CPU time | promised | other's return | return Panoply |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, sides in found.items():
        pair = PAIRS[name]
        seconds = {side: statistics.median(r["seconds"] for r in runs) for side, runs in sides.items()}
        cpu = {
            side: statistics.median(r.get("cpu_seconds", 0.0) for r in runs) for side, runs in sides.items()
        }
        returns = {side: statistics.mean(r["return"] for r in runs) for side, runs in sides.items()}
        other = next(side for side in sides if side != "panoply")
        steps = sides[other][0]["steps"]
        by_cpu = f"{cpu[other] / cpu['panoply']:.2f}" if all(cpu.values()) else "–"
        lines.append(
            f"| {pair.title} | {steps / seconds[other]:,.0f} | {steps / seconds['panoply']:,.0f} | "
            f"{seconds[other] / seconds['panoply']:.2f} | {by_cpu} | {pair.promise:g} | {returns[other]:.0f} | "
            f"{returns['panoply']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(PAIRS), choices=list(PAIRS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=None, help="environment steps, where fewer are enough")
    parser.add_argument("--cell", nargs=3, metavar=("NAME", "SIDE", "SEED"))
    chosen = parser.parse_args()
    if chosen.cell:
        name, side, seed = chosen.cell
        pair = PAIRS[name]
        pair = Pair(pair.title, pair.env, chosen.steps or pair.steps, pair.sides, pair.promise)
        print(json.dumps({**pair.sides[side](pair, int(seed)), "steps": pair.steps}))
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    for name in chosen.only:
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in PAIRS[name].sides}
        for seed in range(chosen.repeats):
            for side in runs:
                runs[side].append(run_cell(name, side, seed, chosen.steps))
                print(name, side, runs[side][-1], flush=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(runs, indent=1))
    stored = {f.stem: json.loads(f.read_text()) for f in sorted(RESULTS.glob("*.json"))}
    print(table(stored))


if __name__ == "__main__":
    main()
