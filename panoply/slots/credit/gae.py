"""Credit from a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from panoply.experience import TERMINATED, Experience, Segments
from panoply.parts import part
from panoply.slots.credit.returns import in_time


def generalised_advantage(
    reward: Tensor, value: Tensor, bootstrap: Tensor, episode: Tensor, gamma: float, lam: float
) -> Tensor:
    """A_t = Σ_k (γλ)^k δ_{t+k},  δ_t = r_t + γ·V_{t+1} − V_t, per episode; rows are in the order they happened.

    `bootstrap` is V after an episode's last row: 0 where it terminated.
    """
    episodes = Segments(episode)
    after = episodes.following(value, bootstrap)
    return episodes.to_go(reward + gamma * after - value, gamma * lam)


@part(
    "credit",
    equation="A = Σ_k (γλ)^k·δ_k,  δ = r + γV′ − V,  γ = {gamma}, λ = {lam}",
    needs={"column:value"},
    gives={"column:target"},
    bounds={"gamma": "from 0 to 1", "lam": "from 0 to 1"},
)
def gae(
    experience: Experience, *, gamma: float = 1.0, lam: float = 0.95, normalise: bool = True
) -> dict[str, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438), and the critic's `target` A + V.

    What follows an episode's last row is worth 0 if it terminated, and `next_value`, where the critic gives one, if it
    was truncated or goes on beyond the batch. Without it, as for a text cut at its length limit, nothing follows. The
    target is taken before advantages are normalised.
    """
    value = experience["value"]
    bootstrap = torch.zeros_like(value)
    if "next_value" in experience:
        bootstrap = experience["next_value"].masked_fill(experience["end"] == TERMINATED, 0.0)
    reward, order, episode = experience["reward"].float(), in_time(experience), experience["episode"]
    advantage = torch.empty_like(value)
    advantage[order] = generalised_advantage(
        reward[order], value[order], bootstrap[order], episode[order], gamma, lam
    )
    target = advantage + value
    if normalise and len(advantage) > 1:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return {"advantage": advantage, "target": target}
