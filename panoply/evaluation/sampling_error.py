"""How far data are from what a policy would do: KL(what was done‖the policy), which falls as more is sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from panoply.experience import Experience
    from panoply.policies.control import ControlPolicy


def tabular_error(state: Tensor, action: Tensor, policy: Tensor) -> float:
    """Σ_s d(s)·KL(π_D(·|s)‖π(·|s)) of states and actions that are numbers, for a table π[state, action]."""
    states, actions = policy.shape
    counts = torch.bincount(state.long() * actions + action.long(), minlength=states * actions)
    counts = counts.view(states, actions).double()
    done = counts / counts.sum(1, keepdim=True).clamp(min=1)
    gaps = torch.where(counts > 0, counts * (done / policy).log(), 0.0)
    return float(gaps.sum() / counts.sum())


def fitted_error(policy: ControlPolicy, experience: Experience, epochs: int = 250, lr: float = 1e-3) -> float:
    """mean log π_D − log π of the data, π_D being the policy with its last layer fitted to them by maximum likelihood.

    For any observations and actions (arXiv 2311.08290). Never below 0, where it begins, but for the optimiser's noise.
    """
    fitted = policy.copy()
    last = [*fitted.model.layers.last(), *fitted.head.parameters()]
    for weight in last:
        weight.requires_grad_(True)
    adam = torch.optim.Adam(last, lr=lr)
    for _ in range(epochs):
        adam.zero_grad()
        (-fitted.score(experience)["logp"].mean()).backward()  # type: ignore[no-untyped-call]
        adam.step()
    with torch.no_grad():
        return float((fitted.score(experience)["logp"] - policy.score(experience)["logp"]).mean())
