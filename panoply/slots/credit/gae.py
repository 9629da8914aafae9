"""Credit from a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from panoply.experience import TRUNCATED, Experience, Segments
from panoply.parts import part


def generalised_advantage(
    reward: Tensor, value: Tensor, bootstrap: Tensor, episode: Tensor, gamma: float, lam: float
) -> Tensor:
    """A_t = Σ_k (γλ)^k δ_{t+k},  δ_t = r_t + γ·V_{t+1} − V_t, per episode; rows are in the order they happened.

    `bootstrap` is V after an episode's last row: 0 where it terminated.
    """
    count, grid = Segments(episode).count, Segments(episode).grid()
    advantage = torch.zeros_like(value)
    carried = value.new_zeros(len(count))
    following = value.new_zeros(len(count))
    for t in range(grid.shape[1] - 1, -1, -1):
        inside = grid[:, t] >= 0
        row = grid[inside, t]
        last = count.eq(t + 1)[inside]
        after = torch.where(last, bootstrap[row], following[inside])
        delta = reward[row] + gamma * after - value[row]
        carried[inside] = delta + gamma * lam * carried[inside]  # still 0 at an episode's last row
        following[inside] = value[row]
        advantage[row] = carried[inside]
    return advantage


@part(
    "credit", equation="A = Σ_k (γλ)^k·δ_k,  δ = r + γV′ − V,  γ = {gamma}, λ = {lam}", needs={"column:value"}
)
def gae(
    experience: Experience, *, gamma: float = 1.0, lam: float = 0.95, normalise: bool = True
) -> dict[str, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438), and the critic's `target` A + V.

    A truncated episode is closed with the column `next_value` where the world gives one; a terminated one, and a text
    cut at its length limit, ends with value 0. The target is taken before advantages are normalised.
    """
    value = experience["value"]
    bootstrap = torch.zeros_like(value)
    if "next_value" in experience:
        bootstrap = torch.where(experience["end"] == TRUNCATED, experience["next_value"], 0.0)
    reward = experience["reward"].float().to(value.device)
    advantage = generalised_advantage(reward, value, bootstrap, experience["episode"], gamma, lam)
    target = advantage + value
    if normalise and len(advantage) > 1:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return {"advantage": advantage, "target": target}
