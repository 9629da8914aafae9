"""Returns on starts a policy was not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from panoply.evaluation.held_out import Evaluation
from panoply.policies.control import ControlPolicy
from panoply.rollout.control import ControlCollector
from panoply.seeds import torch_rng
from panoply.worlds.control.world import ControlWorld

RESAMPLES = 2000


@dataclass(frozen=True)
class Returns(Evaluation):
    """Mean returns of whole episodes, greedy and sampled, with the mark at which the world counts as solved."""

    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    solved_at: float | None = None

    @property
    def score(self) -> float:
        return max(self.rates.values())

    @property
    def solved(self) -> bool | None:
        """Whether the mean return of the better of the two ways of acting reaches the world's mark."""
        return None if self.solved_at is None else self.score >= self.solved_at

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"problems": self.problems, "attempts": self.attempts, "of": "return"}
        for name, rate in self.rates.items():
            found |= {name: rate, f"{name}_interval": list(self.intervals[name])}
        return {**found, "solved": self.solved, "solved_at": self.solved_at}


def evaluate(
    world: ControlWorld,
    policy: ControlPolicy,
    problems: int,
    *,
    attempts: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    watch: Callable[[int, int], None] = lambda done, total: None,
    **_: Any,
) -> Returns:
    """Play whole episodes from `problems` held-out starts: once greedily, and `attempts` times as the policy acts."""
    collect = ControlCollector(world, policy, seed, split="test")
    starts = [world.task("test", i) for i in range(problems)]
    total = problems * (1 + attempts)
    watch(0, total)
    found: dict[str, Tensor] = {}
    try:
        for name, heat, times in (("greedy", 0.0, 1), ("sampled", temperature, attempts)):
            played = collect.episodes(starts, times, temperature=heat)
            found[name] = played.by("episode").last(played["earned"]).double()
            watch(problems * (1 if name == "greedy" else 1 + attempts), total)
    finally:
        collect.close()
    return Returns(
        problems,
        {name: float(returns.mean()) for name, returns in found.items()},
        attempts,
        intervals={name: bootstrap(returns) for name, returns in found.items()},
        solved_at=world.solved,
    )


def bootstrap(values: Tensor, level: float = 0.95) -> tuple[float, float]:
    """A percentile interval of the mean (Efron 1979). Of a single value it is that value."""
    rows = torch.randint(len(values), (RESAMPLES, len(values)), generator=torch_rng("bootstrap", len(values)))
    means = values[rows].mean(1).sort().values
    tail = (1 - level) / 2
    return float(means[math.floor(tail * RESAMPLES)]), float(means[math.ceil((1 - tail) * RESAMPLES) - 1])
