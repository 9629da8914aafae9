"""Returns on starts a policy was not trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from panoply.evaluation.held_out import Evaluation
from panoply.evaluation.intervals import bootstrap
from panoply.policies.control import ControlPolicy
from panoply.rollout.control import ControlCollector
from panoply.worlds.control.world import ControlWorld


@dataclass(frozen=True, repr=False)
class Returns(Evaluation):
    """Mean returns of whole episodes, greedy and sampled, with the mark at which the world counts as solved."""

    solved_at: float | None = None

    @property
    def score(self) -> float:
        return max(self.rates.values())

    @property
    def solved(self) -> bool | None:
        """Whether the mean return of the better of the two ways of acting reaches the world's mark."""
        return None if self.solved_at is None else self.score >= self.solved_at

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "solved": self.solved, "solved_at": self.solved_at}


def evaluate(
    world: ControlWorld,
    policy: ControlPolicy,
    problems: int,
    *,
    attempts: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
    split: str = "test",
    greedy: bool = True,
    watch: Callable[[int, int], None] = lambda done, total: None,
    **_: Any,
) -> Returns:
    """Play whole episodes from `problems` held-out starts: once greedily, and `attempts` times as the policy acts.

    split    `test`, or `validation`: the starts that follow those, to choose settings by
    greedy   whether episodes are played greedily at all; the others do not change with it
    """
    collect = ControlCollector(world, policy, seed, split="test")
    first = problems if split == "validation" else 0
    starts = [world.task("test", i) for i in range(first, first + problems)]
    ways = [("greedy", 0.0, 1)] if greedy else []
    total, done = problems * (greedy + attempts), 0
    watch(done, total)
    found: dict[str, Tensor] = {}
    try:
        for name, sampled_at, times in (*ways, ("sampled", temperature, attempts)):
            if not greedy:
                # draws belong to an episode's number, and greedy ones would have come first
                collect.state["episodes"] = collect.state["groups"] = problems * world.seats
            played = collect.episodes(starts, times, temperature=sampled_at)
            found[name] = played.by("episode").last(played["earned"]).double()
            watch(done := done + problems * times, total)
    finally:
        collect.close()
    return Returns(
        problems,
        {name: float(returns.mean()) for name, returns in found.items()},
        attempts,
        of="return",
        intervals={name: bootstrap(returns) for name, returns in found.items()},
        solved_at=world.solved,
    )
