"""Rewards scaled by what has been earned so far."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from panoply.experience import OPEN, OWN, Experience, Segments
from panoply.parts import Part, part
from panoply.slots.credit.returns import in_time
from panoply.slots.reward.signals import signal

_SIGNAL = signal()


def so_far(experience: Experience, reward: Tensor, gamma: float, open_: dict[str, float]) -> Tensor:
    """G_t = r_t + γ·G_{t−1} inside each episode; `open_` holds G of episodes that an earlier batch left open."""
    back = in_time(experience).flip(0)
    found = torch.empty_like(reward)
    found[back] = Segments(experience["episode"][back]).to_go(reward[back], gamma)
    episodes, turn = experience.by("episode"), experience["turn"]
    before = torch.tensor([open_.get(str(e), 0.0) for e in episodes.keys.tolist()], dtype=reward.dtype)
    since = (turn - episodes.rows(episodes.min(turn)) + 1).to(reward.dtype)
    return found + episodes.rows(before) * gamma**since


def count_in(state: dict[str, Any], values: Tensor) -> dict[str, Any]:
    """How many numbers there were so far, their mean, and the sum of squares around it, with these too."""
    added, gap = float(len(values)), float(values.mean()) - state["mean"]
    count = state["count"] + added
    square = (
        state["square"] + float(values.var(correction=0)) * added + gap**2 * state["count"] * added / count
    )
    return {"count": count, "mean": state["mean"] + gap * added / count, "square": square}


@part(
    "reward",
    equation=lambda held: f"({held.reward.equation()}) / std(Σ {held.gamma:g}^k·r)",
    state=lambda: {"count": 0.0, "mean": 0.0, "square": 0.0, "open": {}},
    bounds={"gamma": "from 0 to 1", "limit": "above 0"},
)
def over_deviation(
    state: dict[str, Any],
    experience: Experience,
    *,
    reward: Part = _SIGNAL,
    gamma: float = 0.99,
    limit: float = 10.0,
) -> tuple[dict[str, Any], Tensor]:
    """A reward over the running deviation of discounted returns (SB3's VecNormalize), bounded to ±limit.

    What a world pays in then matters less for the learning rate and the critic. The batch itself is counted in first.
    """
    earned = reward(experience).float()
    returns = so_far(experience, earned, gamma, state["open"]).double()
    counted = count_in(state, returns)
    last = experience.by("episode").is_last() & (experience["end"] == OPEN)
    left = {
        str(e): g for e, g in zip(experience["episode"][last].tolist(), returns[last].tolist(), strict=True)
    }
    deviation = (counted["square"] / counted["count"] + 1e-8) ** 0.5
    return {**counted, "open": left}, (earned / deviation).clamp(-limit, limit)


def _standardised_needs(held: Any) -> frozenset[str]:
    return frozenset() if held.beta == 0 or held.to == "behaviour" else frozenset({f"logp@{held.to}"})


def _standardised_equation(held: Any) -> str:
    score = f"({held.reward.equation()} − mean)" if held.centre else f"({held.reward.equation()})"
    pull = f" − {held.beta:g}·log π/π_{held.to}" if held.beta else ""
    return f"clip({score}/std, ±{held.limit:g}) on the last decision{pull}, mean and std of all scores so far"


@part(
    "reward",
    equation=_standardised_equation,
    needs=_standardised_needs,
    state=lambda: {"count": 0.0, "mean": 0.0, "square": 0.0},
    inert=lambda held, method: [("to", "beta is 0")] if held.beta == 0 else [],
    bounds={"limit": "above 0", "beta": "at least 0"},
)
def standardised(
    state: dict[str, Any],
    experience: Experience,
    *,
    reward: Part = _SIGNAL,
    centre: bool = True,
    limit: float = 10.0,
    beta: float = 0.05,
    to: str = "reference",
) -> tuple[dict[str, Any], Tensor]:
    """An episode's score in deviations of all scores so far, bounded, less β·log π/π_ref on every decision.

    Mean and deviation are of the whole history, this batch included, and not of the batch: as the policy improves,
    scores stay above the mean, until the bound makes them all alike. The pull to the reference is of the policy that
    acted, so that it stays what it was while a batch is learned from several times. Answers of others earn nothing.

    centre   whether the mean is taken away; without, scores are only scaled
    """
    episodes = experience.by("episode")
    own = (
        experience["source"] == OWN
        if "source" in experience
        else torch.ones(len(experience), dtype=torch.bool)
    )
    scores, mine = episodes.sum(reward(experience).double()), episodes.first(own)
    state = count_in(state, scores[mine])
    deviation = (state["square"] / max(1.0, state["count"] - 1)) ** 0.5 or 1.0
    bounded = ((scores - (state["mean"] if centre else 0.0)) / deviation).clamp(-limit, limit)
    earned = torch.where(episodes.is_last(), episodes.rows(bounded), 0.0).float()
    if beta:
        earned = earned - beta * (
            experience["logp"] - experience["logp" if to == "behaviour" else f"logp@{to}"]
        )
    return state, torch.where(own, earned, 0.0)
