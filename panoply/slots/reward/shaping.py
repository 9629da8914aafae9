"""Rewards made of other rewards. Each part wraps one and keeps it on the decision that earned it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from panoply.experience import Experience
from panoply.parts import Finding, Part, part, show_value
from panoply.slots.reward.signals import signal
from panoply.slots.schedule.schedules import linear

_SIGNAL, _FADING = signal(), linear()


@part(
    "reward",
    equation="{right} if {name} else {wrong}",
    needs=lambda held: frozenset({"world:verify", f"signal:{held.name}"}),
    bounds={"right": "any number", "wrong": "any number"},
)
def verdict(
    experience: Experience, *, name: str = "success", right: float = 1.0, wrong: float = -1.0
) -> Tensor:
    """One number for an episode whose signal is above zero and another for the rest, on its last decision."""
    episodes = experience.by("episode")
    succeeded = episodes.rows(episodes.sum(experience[f"signal:{name}"]) > 0)
    return torch.where(succeeded, right, wrong) * episodes.is_last()


@part("reward", equation=lambda held: f"{held.first.equation()} + {held.second.equation()}")
def sum(experience: Experience, *, first: Part = _SIGNAL, second: Part = _SIGNAL) -> Tensor:
    """Two rewards added up, each on the decisions that earned it; one of them may be a sum again."""
    earned: Tensor = first(experience) + second(experience)
    return earned


@part(
    "reward",
    equation=lambda held: (
        f"{held.then.equation()} if {held.gate.equation()} > {held.above:g} else {held.otherwise:g}"
    ),
    bounds={"above": "any number", "otherwise": "any number"},
)
def gated(
    experience: Experience,
    *,
    gate: Part = _SIGNAL,
    then: Part = _SIGNAL,
    above: float = 0.0,
    otherwise: float = 0.0,
) -> Tensor:
    """A reward that counts only in episodes that pass a gate: what comes first must be right before the rest pays.

    gate: a reward whose sum over the episode must be larger than `above`
    otherwise: what an episode earns that does not pass, on its last decision
    """
    episodes = experience.by("episode")
    passed = episodes.rows(episodes.sum(gate(experience)) > above)
    return torch.where(passed, then(experience).float(), otherwise * episodes.is_last())


@part(
    "reward",
    equation=lambda held: f"({show_value(held.weight)})·({held.reward.equation()})",
    inert=lambda held, method: [("reward", "weight is 0")] if held.weight == 0 else [],
    bounds={"weight": "any number"},
)
def annealed(experience: Experience, *, reward: Part = _SIGNAL, weight: float | Part = _FADING) -> Tensor:
    """A reward times a number that follows a schedule: a signal that helps at first and is to be forgotten.

    weight: a schedule, or a number
    """
    return cast(Tensor, weight * reward(experience))


def _penalty_needs(held: Any) -> frozenset[str]:
    return frozenset() if held.beta == 0 or held.to == "behaviour" else frozenset({f"logp@{held.to}"})


def _penalty_inert(held: Any, method: Any) -> list[Finding]:
    return [("to", "beta is 0")] if held.beta == 0 else []


@part(
    "reward",
    equation=lambda held: (
        held.reward.equation() + (f" − {held.beta:g}·log π/π_{held.to}" if held.beta else "")
    ),
    needs=_penalty_needs,
    inert=_penalty_inert,
    bounds={"beta": "at least 0"},
)
def minus_kl(
    experience: Experience, *, reward: Part = _SIGNAL, beta: float = 0.05, to: str = "reference"
) -> Tensor:
    """A reward less β·log π/π_ref on every decision: the pull to the reference as RLHF puts it, into the reward.

    Its expectation is KL(π‖π_ref), and credit treats it like anything else that was earned: a decision pays for how far
    it leads away, and not only for its own step.
    """
    earned: Tensor = reward(experience)
    if beta == 0:
        return earned
    return earned - beta * (experience["logp"] - experience[f"logp@{to}"])


def _invalid_needs(held: Any) -> frozenset[str]:
    return frozenset({"world:verify", f"signal:{held.name}"}) if held.penalty else frozenset()


@part(
    "reward",
    equation=lambda held: (
        held.reward.equation() + (f" − {held.penalty:g}·{held.name}" if held.penalty else "")
    ),
    needs=_invalid_needs,
    inert=lambda held, method: [("name", "penalty is 0")] if held.penalty == 0 else [],
    bounds={"penalty": "at least 0"},
)
def minus_invalid(
    experience: Experience, *, reward: Part = _SIGNAL, penalty: float = 0.1, name: str = "invalid"
) -> Tensor:
    """A reward less a penalty for every turn that could not be done, on the turn itself.

    name: the world's signal that is 1 for such a turn
    """
    earned: Tensor = reward(experience)
    return earned - penalty * experience[f"signal:{name}"] if penalty else earned


def _overlong_impossible(held: Any, method: Any) -> list[Finding]:
    fits = 0 < held.cache <= held.limit
    return [] if fits else [("cache", f"it must be between 1 and limit ({held.limit})")]


def _overlong_inert(held: Any, method: Any, world: Any) -> list[Finding]:
    longest = getattr(world, "max_tokens", 0) * getattr(world, "turn_cap", 1) or getattr(
        world, "horizon", None
    )
    if longest is None or longest > held.limit - held.cache:
        return []
    reason = f"no episode of {world.name} is longer than limit − cache ({held.limit - held.cache})"
    return [(name, reason) for name in ("limit", "cache", "weight")]


@part(
    "reward",
    equation=lambda held: (
        f"{held.reward.equation()} − {held.weight:g}·clip((|y| − {held.limit - held.cache})/"
        f"{held.cache}, 0, 1)"
    ),
    impossible=_overlong_impossible,
    bounds={"limit": "at least 1", "cache": "at least 0", "weight": "at least 0"},
    inert=_overlong_inert,
)
def overlong(
    experience: Experience,
    *,
    reward: Part = _SIGNAL,
    limit: int = 20480,
    cache: int = 4096,
    weight: float = 1.0,
) -> Tensor:
    """A reward less a penalty for length (DAPO, arXiv 2503.14476, eq. 13).

    Nothing up to `limit − cache` decisions, then in a line to `weight` at `limit`, and so for all that are longer.
    """
    episodes = experience.by("episode")
    over = ((episodes.count - (limit - cache)) / cache).clamp(0, 1)
    earned: Tensor = reward(experience)
    return earned - weight * episodes.rows(over) * episodes.is_last()
