"""How many steps learners need on small MDPs, and what would have told so beforehand."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from panoply.evidence.statistics import spearman
from panoply.progress import Progress
from panoply.seeds import numpy_rng
from panoply.worlds.control.mdp import MDP, greedy, softmax
from panoply.worlds.control.world import Array

if TYPE_CHECKING:
    from panoply.experience import Experience
    from panoply.loops.job import Job
    from panoply.policies.control import ControlPolicy
    from panoply.worlds.control.tabular import Tabular

SOLVED = 0.95
"""Of the way from what acting at random earns to the best."""
MOST = 20_000
"""Steps after which a learner is given up; it then counts as needing twice as many."""
PROBLEMS: tuple[Mapping[str, Any], ...] = (
    *({"variant": "corridor", "size": size, "horizon": size} for size in (4, 6, 8)),
    {"variant": "corridor", "size": 5, "slip": 0.2, "horizon": 8},
    *(
        {"variant": "lock", "size": depth, "actions": 3, "lure": 0.0, "horizon": depth}
        for depth in (2, 3, 4, 5, 7)
    ),
    {"variant": "lock", "size": 3, "actions": 3, "lure": 0.1, "horizon": 3},
    {"variant": "lock", "size": 6, "actions": 2, "lure": 0.05, "horizon": 6},
    {"variant": "tree", "size": 2, "actions": 4, "goals": 2, "horizon": 2},
    {"variant": "tree", "size": 4, "actions": 3, "goals": 3, "horizon": 4},
    *({"variant": "chain", "size": size, "horizon": 2 + 2 * size} for size in (3, 4, 5)),
    *({"variant": "riverswim", "size": size, "horizon": 4 + 2 * size} for size in (3, 4)),
    {"variant": "random", "size": 5, "horizon": 6},
    {"variant": "random", "size": 10, "actions": 3, "horizon": 6},
)
"""Dense and sparse rewards, deterministic and slippery, with and without something that tempts."""
PPO = {
    "policy.hidden": (),
    "sample.envs": 8,
    "sample.length": 16,
    "credit.gamma": 1.0,
    "update.lr": 0.02,
    "update.epochs": 8,
    "update.minibatches": 1,
    "run.held_out": 1,
    "run.evaluate_every": 0,
    "run.checkpoint_every": 10_000,
    "run.episodes_every": 0,
}
"""A table of logits and one of values, in batches that suit so small problems."""


class Problem:
    """A tabular world with a horizon, and when it counts as solved."""

    def __init__(self, options: Mapping[str, Any]):
        from panoply.worlds.control.tabular import Tabular

        self.options = options
        self.world: Tabular = Tabular(**options)
        self.mdp: MDP = self.world.mdp
        self.horizon = self.world.horizon or 0

    @cached_property
    def mark(self) -> float:
        least = self.mdp.value(softmax(np.zeros((self.mdp.states, self.mdp.actions))), 1.0, self.horizon)
        return least + SOLVED * (self.mdp.best(1.0, self.horizon) - least)

    def solved(self, policy: Array) -> bool:
        return self.mdp.value(policy, 1.0, self.horizon) >= self.mark


def steps_of_sqirl(problem: Problem, seed: int, repeats: int = 5) -> int:
    """The fewest steps with which SQIRL on tables solves a problem in most of `repeats` tries, for k up to 3."""
    from panoply.evaluation.effective_horizon import tabular_sqirl

    for doublings in range(32):
        needed = []
        for k in (1, 2, 3):
            tries = []
            for again in range(repeats):
                rng = numpy_rng("sqirl", seed, k, doublings, again)
                policy, steps = tabular_sqirl(problem.mdp, problem.horizon, k, 2**doublings, rng)
                tries.append(problem.solved(policy))
            if sum(tries) > repeats / 2:
                needed.append(steps)
        if needed or steps > MOST:
            return min(needed, default=2 * MOST)
    raise AssertionError("unreachable")


class _Solved(Exception):
    pass


class _Until(Progress):
    """Stops a run when the greedy policy solves the problem, by its exact value."""

    def __init__(self, problem: Problem):
        self.problem, self.steps = problem, 2 * MOST

    def step(self, job: Job, record: Mapping[str, Any], experience: Experience) -> None:
        import torch

        with torch.no_grad():
            logits = cast("ControlPolicy", job.policy).model(torch.arange(self.problem.mdp.states))
        if self.problem.solved(greedy(logits.double().numpy())):
            self.steps = int(record["total_decisions"])
            raise _Solved


def steps_of_ppo(problem: Problem, seed: int) -> int:
    """After how many steps PPO's greedy policy solves a problem."""
    from panoply import api

    until = _Until(problem)
    of_world = {f"world.{name}": value for name, value in problem.options.items()}
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(_Solved):
        api.train(
            "ppo",
            "tabular",
            run=Path(folder) / "run",
            seed=seed,
            threads=1,
            progress=until,
            settings={**PPO, **of_world, "run.decisions": MOST},
        )
    return until.steps


def predicted(seed: int, problems: tuple[Mapping[str, Any], ...] = PROBLEMS) -> dict[str, float]:
    """Rank correlations over problems with the steps that PPO needs; the first number decides.

    That of SQIRL's steps is to be above 0.6 and above those of the horizon and of the number of states.
    """
    every = [Problem(options) for options in problems]
    needs = [steps_of_ppo(problem, seed) for problem in every]
    guesses: dict[str, Callable[[Problem], float]] = {
        "SQIRL": lambda problem: steps_of_sqirl(problem, seed),
        "horizon": lambda problem: problem.horizon,
        "states": lambda problem: problem.mdp.states,
    }
    found = {name: spearman([guess(p) for p in every], needs) for name, guess in guesses.items()}
    ahead = found["SQIRL"] - max(0.6, found["horizon"], found["states"])
    return {"beyond what it must exceed": ahead, **{f"correlation of {n}": v for n, v in found.items()}}
