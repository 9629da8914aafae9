"""What of a data set decides which offline method works on it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from panoply.evidence.claims import Ahead
from panoply.registry import protocol
from panoply.worlds.logged.behaviour import Mix

MIXES: tuple[Mix, ...] = ("random", "expert", "noisy", "mixed", "replay")
SIZE = 4000
"""Steps of each data set."""
SMALL: Mapping[str, Any] = {"policy.hidden": (128, 128), "replay.batch": 64, "replay.gamma": 0.95}
ONLINE: Mapping[str, Any] = {
    **SMALL,
    "sample.envs": 10,
    "sample.length": 100,
    "sample.fade": 5000,
    "replay.every": 1,
    "replay.updates": 1,
    "targets.every": 50,
    "update.lr": 1e-3,
    "run.steps": 20,
    "run.evaluate_every": 4,
    "run.checkpoint_every": 4,
}
"""20,000 steps, and an update after every ten of them."""
OFFLINE: Mapping[str, Any] = {
    **SMALL,
    "policy.hidden": (64, 64),
    "run.steps": 10,
    "run.evaluate_every": 2,
    "run.checkpoint_every": 10,
}
IMITATION = {"policy.hidden": (64, 64), "run.evaluate_every": 5, "run.checkpoint_every": 20}
METHODS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bc": ("bc", IMITATION),
    "dqn": ("discrete-cql", {**OFFLINE, "losses.q_learning.conservative": 0.0}),
    "cql": ("discrete-cql", OFFLINE),
    "crr": ("crr", OFFLINE),
}
"""CQL and CRR are measured beside those that the claim is about."""


def measure(seed: int) -> dict[str, float]:
    """Correlations of what methods reach with TQ and SACo over the five data sets of one online run."""
    found = performances(seed)
    tq, saco = ([of[name] for of in found.values()] for name in ("tq", "saco"))
    with_tq = {m: pearson([of[m] for of in found.values()], tq) for m in METHODS}
    with_saco = {m: pearson([of[m] for of in found.values()], saco) for m in METHODS}
    stated = (with_tq["bc"] - with_saco["bc"], with_saco["dqn"] - with_tq["dqn"])
    each = {f"{m} with TQ": with_tq[m] for m in METHODS} | {f"{m} with SACo": with_saco[m] for m in METHODS}
    of = {f"{mix} {name}": value for mix, about in found.items() for name, value in about.items()}
    return {"least of the stated differences": min(stated), **each, **of}


def performances(
    seed: int, size: int = SIZE, online: Mapping[str, Any] = ONLINE
) -> dict[str, dict[str, float]]:
    """TQ, SACo, lSACo and what each method reaches (0 as random, 1 as the online run), a data set each."""
    from panoply.api import train
    from panoply.progress import Progress
    from panoply.worlds.logged.logged import Logged

    quiet: dict[str, Any] = {"seed": seed, "threads": 1, "progress": Progress()}
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as kept:
        run = Path(kept) / "online"
        train("dqn", "cartpole", run=run, settings=dict(online), **quiet)
        for mix in MIXES:
            about = Logged("cartpole", mix, size, seed, run=str(run)).data.about
            worst, best = about["return_random"], about["return_expert"]
            found[mix] = {name: about[name] for name in ("tq", "saco", "lsaco")}
            of = {"world.run": str(run), "world.size": size, "world.seed": seed}
            for name, (method, settings) in METHODS.items():
                done = train(
                    method,
                    f"logged:cartpole-{mix}",
                    run=Path(kept) / f"{name}-{mix}",
                    settings={**settings, **of},
                    **quiet,
                )
                found[mix][name] = (_best(done.run) - worst) / (best - worst)
    return found


def _best(run: Path) -> float:
    """The highest mean return of the greedy policy at any evaluation."""
    from panoply.run import Run

    return max(float(row["held_out_greedy"]) for row in Run.open(run).metrics() if "held_out_greedy" in row)


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Their correlation; 0 where one of them does not vary."""
    a, b = (np.asarray(v, np.float64) - np.mean(v) for v in (x, y))
    size = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / size if size else 0.0


CLAIM = Ahead(
    "Over data sets of one online run, what imitation reaches goes with trajectory quality rather than coverage, and "
    "what deep Q-learning reaches with coverage rather than quality.",
    measure,
    reworded="it failed by a third part, that what conservative Q-learning reaches goes with both: over these five "
    "data sets coverage falls as quality rises, so nothing can go with both.",
)


@protocol("dataset-perspective@1", paper=135, claim=CLAIM)
def dataset_perspective(seed: int = 0) -> dict[str, dict[str, float]]:
    """A Dataset Perspective on Offline RL (arXiv 2111.04714): two numbers of a data set, TQ (how good its episodes are)
    and SACo (how much it covers), say which methods will work on it.

    Five data sets of one online run of DQN: random, its greedy policy (expert), four fifths random and the rest expert
    (mixed), the expert with ε = 0.2 (noisy), and episodes of its replay, against which coverage is counted. Performance
    is 0 for a random policy and 1 for the online run's, the best of the evaluations. Of the paper's nine algorithms BC,
    DQN, CQL and CRR are trained; not there are BVE, MCE, QR-DQN, REM and BCQ, and the worlds beside CartPole.
    """
    return performances(seed)
