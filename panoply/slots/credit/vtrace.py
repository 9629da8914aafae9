"""Credit from a critic for decisions that another policy took."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from panoply.experience import TERMINATED, Experience, Segments
from panoply.parts import Finding, part
from panoply.slots.credit.returns import in_time


def traced(
    reward: Tensor,
    value: Tensor,
    bootstrap: Tensor,
    ratio: Tensor,
    episode: Tensor,
    *,
    gamma: float,
    lam: float,
    rho: float,
    c: float,
) -> tuple[Tensor, Tensor]:
    """v = V + Σ_k γ^k·(Π_{i<k} c_i)·δ_k with δ = ρ·(r + γ·V′ − V), and ρ·(r + γ·v′ − V), per episode in order.

    ρ = min(π/μ, `rho`) and c = λ·min(π/μ, `c`); `bootstrap` is V after an episode's last row.
    """
    episodes = Segments(episode)
    weight = ratio.clamp(max=rho)
    errors = weight * (reward + gamma * episodes.following(value, bootstrap) - value)
    aims = value + episodes.to_go(errors, gamma * lam * ratio.clamp(max=c))
    return aims, weight * (reward + gamma * episodes.following(aims, bootstrap) - value)


def _twice(held: Any, method: Any) -> list[Finding]:
    if method.surrogate.settings().get("against") != "behaviour":
        return []
    return [
        ("", "its weights and the surrogate's ratio correct for one thing twice: set surrogate.against=old")
    ]


@part(
    "credit",
    equation="A = ρ·(r + γ·v′ − V),  v = V + Σ_k γ^k·(Π c)·ρ·δ_k,  ρ = min(π/μ, {rho}), c = {lam}·min(π/μ, {c})",
    needs={"column:value", "logp@old"},
    gives={"column:target"},
    impossible=_twice,
    bounds={"gamma": "from 0 to 1", "lam": "from 0 to 1", "rho": "above 0", "c": "above 0"},
)
def vtrace(
    experience: Experience,
    *,
    gamma: float = 0.99,
    lam: float = 1.0,
    rho: float = 1.0,
    c: float = 1.0,
    normalise: bool = False,
) -> dict[str, Tensor]:
    """V-trace (IMPALA, arXiv 1802.01561): returns of the policy as it is, from what an earlier self μ did.

    π/μ is taken once, at the weights before the step's first update; where μ is π these are λ-returns. An episode's end
    is treated as in `credit.gae`.

    rho   bounds the weight of each error, and so decides whose value is learned: π's where it binds nowhere
    c     bounds how far an error reaches back, and so the variance alone
    """
    value = experience["value"]
    bootstrap = torch.zeros_like(value)
    if "next_value" in experience:
        bootstrap = experience["next_value"].masked_fill(experience["end"] == TERMINATED, 0.0)
    order = in_time(experience)
    ratio = (experience["logp@old"] - experience["logp"]).clamp(-20, 20).exp().to(value.dtype)
    columns = (experience["reward"].to(value.dtype), value, bootstrap, ratio, experience["episode"])
    target, advantage = torch.empty_like(value), torch.empty_like(value)
    target[order], advantage[order] = traced(
        *(column[order] for column in columns), gamma=gamma, lam=lam, rho=rho, c=c
    )
    if normalise and len(advantage) > 1:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    return {"advantage": advantage, "target": target}
