"""Credit from a critic."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.experience import TERMINATED, Experience, Segments
from panoply.parts import Finding, part
from panoply.slots.credit.returns import in_time


def generalised_advantage(
    reward: Tensor, value: Tensor, bootstrap: Tensor, episode: Tensor, gamma: float | Tensor, lam: float
) -> Tensor:
    """A_t = Σ_k (γλ)^k δ_{t+k},  δ_t = r_t + γ·V_{t+1} − V_t, per episode; rows are in the order they happened.

    `bootstrap` is V after an episode's last row: 0 where it terminated. `gamma` may be one a row: of what follows it.
    """
    episodes = Segments(episode)
    after = episodes.following(value, bootstrap)
    return episodes.to_go(reward + gamma * after - value, gamma * lam)


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    if world.medium == "control":
        return [(name, f"a turn of {world.name} is one decision") for name in ("by", "inside")]
    if getattr(world, "max_tokens", 0) == 1:
        return [(name, f"a turn of {world.name} is one token") for name in ("by", "inside")]
    if held.by == "turn":
        return [("inside", "steps are turns, and what is inside them is one step (credit.by=turn)")]
    if held.inside is not None and getattr(world, "turn_cap", 0) == 1:
        return [("gamma", f"episodes of {world.name} have one turn, and it discounts between turns alone")]
    return []


def _equation(held: Any) -> str:
    if held.by == "turn" or held.inside is None:
        within = ", turn by turn" if held.by == "turn" else ""
    else:
        within = f"; inside a turn γ = {held.inside:g}"
    return f"A = Σ_k (γλ)^k·δ_k,  δ = r + γV′ − V,  γ = {held.gamma:g}, λ = {held.lam:g}{within}"


@part(
    "credit",
    equation=_equation,
    needs={"column:value"},
    gives={"column:target"},
    inert=_inert,
    bounds={"gamma": "from 0 to 1", "lam": "from 0 to 1", "inside": "from 0 to 1", "limit": "above 0"},
)
def gae(
    experience: Experience,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    normalise: bool = True,
    by: Literal["decision", "turn"] = "decision",
    inside: float | None = None,
    limit: float | None = None,
) -> dict[str, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438), and the critic's `target` A + V.

    What follows an episode's last row is worth 0 if it terminated, and `next_value`, where the critic gives one, if it
    was truncated or goes on beyond the batch. Without it, as for a text cut at its length limit, nothing follows. The
    target is taken before advantages are normalised.

    by   what k counts and γ discounts: decisions, or turns, where one turn is several decisions (tokens, parts of one
         action). A turn earns what its rows earn, is worth what its first row is, and all its rows get its A.
    inside   γ between two decisions of one turn, where it is another than between turns: with 1, a long turn is worth
             no less than a short one that earns as much (λ still counts every decision)
    limit   advantages are bounded to ± this, after they are normalised
    """
    value = experience["value"]
    bootstrap = torch.zeros_like(value)
    if "next_value" in experience:
        bootstrap = experience["next_value"].masked_fill(experience["end"] == TERMINATED, 0.0)
    order, episode = in_time(experience), experience["episode"]
    steps = Segments(
        experience.by("turn").index[order] if by == "turn" else torch.arange(len(order), device=order.device)
    )
    worth = steps.first(value[order])
    earned, after = steps.sum(experience["reward"].float()[order]), steps.last(bootstrap[order])
    discount: float | Tensor = gamma
    if inside is not None and by == "decision":
        border = experience.by("turn").index[order]
        discount = torch.full_like(worth, gamma)
        discount[:-1][border[1:] == border[:-1]] = inside
    found = generalised_advantage(earned, worth, after, steps.first(episode[order]), discount, lam)
    advantage, target = torch.empty_like(value), torch.empty_like(value)
    advantage[order], target[order] = steps.rows(found), steps.rows(found + worth)
    if normalise and len(advantage) > 1:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    if limit is not None:
        advantage = advantage.clamp(-limit, limit)
    return {"advantage": advantage, "target": target}
