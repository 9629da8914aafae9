"""Acting step by step, for methods that learn in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from panoply.parts import Finding, part

if TYPE_CHECKING:
    from panoply.rollout.control import Acting, ControlCollector


def _impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    if world.seats == 1:
        return []
    return [("", f"a replay keeps one row an environment, and {world.seats} play in one of {world.name}")]


@part(
    "sample",
    equation="{length} steps of {envs} environments",
    needs={"world:step", "world:control"},
    gives={"steps"},
    impossible=_impossible,
    cost=lambda held, of: (held.envs * held.length, held.envs * held.length),
    bounds={
        "envs": "at least 1",
        "length": "at least 1",
        "random": "at least 0",
        "start": "at least 1",
        "fade": "at least 0",
    },
)
def explore(
    collect: ControlCollector,
    *,
    envs: int = 1,
    length: int = 1000,
    random: int = 100,
    start: float = 1.0,
    fade: int = 0,
) -> Acting:
    """So many steps, in which episodes go on from one batch to the next; the policy acts with its own noise.

    random   steps at the very beginning in which any action is taken
    start    how many times as noisy the policy is at first
    fade     steps until that is over, fewer times at every batch
    """
    seen: int = collect.state["decisions"]
    left = max(0.0, 1 - seen / fade) if fade else 0.0
    return collect.steps(envs, length, temperature=1 + (start - 1) * left, random=random)
