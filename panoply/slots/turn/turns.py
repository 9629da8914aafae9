"""Who learns in a step, where several learn in one run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from panoply.parts import Finding, part

Names = tuple[str, ...]


@part("turn", equation="all in every step")
def all_(names: Names, step: int, metrics: Mapping[str, float]) -> Names:
    """Every seat learns in every step."""
    return names


def _steps_fit(held: Any, method: Any) -> list[Finding]:
    if len(held.steps) not in (1, len(method.seats)):
        return [("steps", f"there are {len(method.seats)} seats: give a number for each, or one for all")]
    return []


@part(
    "turn",
    equation="one after another, {steps} steps at a time",
    bounds={"steps": "at least 1"},
    impossible=_steps_fit,
)
def alternate(
    names: Names, step: int, metrics: Mapping[str, float], *, steps: tuple[int, ...] = (1,)
) -> Names:
    """One seat after another, in the order in which they are named.

    steps   how many steps each learns at a time, or one number for all
    """
    lengths = steps * len(names) if len(steps) == 1 else steps
    order = [name for name, length in zip(names, lengths, strict=True) for _ in range(length)]
    return (order[step % len(order)],)


def _filled_fits(held: Any, method: Any) -> list[Finding]:
    if method.game is None:
        return [("episodes", "no game deals out rows that could wait")]
    if len(held.episodes) not in (1, len(method.seats)):
        return [("episodes", f"there are {len(method.seats)} seats: give a number for each, or one for all")]
    if min(held.episodes) > 1:
        return [("episodes", "there would be steps in which nobody learns: one of them has to be 1")]
    return []


@part(
    "turn",
    equation="whoever has {episodes} episodes",
    bounds={"episodes": "at least 1"},
    gives={"waiting"},
    impossible=_filled_fits,
)
def filled(
    names: Names, step: int, metrics: Mapping[str, float], *, episodes: tuple[int, ...] = (1,)
) -> Names:
    """A seat learns once the game has dealt it so many episodes; until then they wait, and are saved with the run.

    episodes   for each seat, in the order in which they are named, or one number for all
    """
    enough = episodes * len(names) if len(episodes) == 1 else episodes
    return tuple(
        name for name, least in zip(names, enough, strict=True) if metrics[f"waiting_{name}"] >= least
    )


def _gap(held: Any, method: Any) -> list[Finding]:
    return [("below", "it has to be less than above")] if held.below >= held.above else []


@part(
    "turn",
    equation="the next one when {metric} is above {above}, the one before when it is below {below}",
    bounds={"above": "any number", "below": "any number"},
    impossible=_gap,
    state=lambda: {"at": 0},
)
def when(
    state: dict[str, Any],
    names: Names,
    step: int,
    metrics: Mapping[str, float],
    *,
    metric: str = "success",
    above: float = 0.75,
    below: float = 0.25,
) -> tuple[dict[str, Any], Names]:
    """The first seat learns until a metric of the last step is high, then the next until it is low again.

    metric   of the first seat by its name, of others with theirs before it: `proposer_reward`
    """
    last = metrics.get(metric)
    if last is not None and last > above:
        state = {"at": min(state["at"] + 1, len(names) - 1)}
    elif last is not None and last < below:
        state = {"at": max(state["at"] - 1, 0)}
    return state, (names[state["at"]],)
