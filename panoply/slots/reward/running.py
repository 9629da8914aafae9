"""Rewards scaled by what has been earned so far."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from panoply.experience import OPEN, Experience, Segments
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
    added, gap = float(len(returns)), float(returns.mean()) - state["mean"]
    count = state["count"] + added
    square = (
        state["square"] + float(returns.var(correction=0)) * added + gap**2 * state["count"] * added / count
    )
    last = experience.by("episode").is_last() & (experience["end"] == OPEN)
    left = {
        str(e): g for e, g in zip(experience["episode"][last].tolist(), returns[last].tolist(), strict=True)
    }
    kept = {"count": count, "mean": state["mean"] + gap * added / count, "square": square, "open": left}
    deviation = (square / count + 1e-8) ** 0.5
    return kept, (earned / deviation).clamp(-limit, limit)
