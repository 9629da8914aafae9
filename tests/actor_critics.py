"""What tests of losses on transitions share: a few rows, small agents, and critics that say what they are told to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.transitions import ActorCritic, QNets, StateValue, Temperature, Transitions
from panoply.worlds.control.world import Box, Discrete

SEES, ACTS, CHOICES = Box((2,)), Box((1,), (-2.0,), (2.0,)), Discrete(3)


class Fixed(nn.Module):
    """Critics that say what they are told to."""

    def __init__(self, *values: list[float]):
        super().__init__()
        self.said = nn.ParameterList(torch.tensor(v, dtype=torch.float64) for v in values)

    def forward(self, *_: Any) -> list[Tensor]:
        return list(self.said)

    def first(self, *_: Any) -> Tensor:
        return self.said[0]

    def least(self, *_: Any) -> Tensor:
        return torch.stack(list(self.said)).amin(0)


def rows(n: int = 2, **columns: Any) -> Transitions:
    generator = torch.Generator().manual_seed(3)
    made = {
        "observation": torch.randn(n, 2, generator=generator),
        "action": torch.rand(n, 1, generator=generator) * 2 - 1,
        "reward": torch.tensor([1.0, 2.0] * n)[:n],
        "discount": torch.tensor([0.5, 0.0] * n)[:n],  # the second one terminated
        "next_observation": torch.randn(n, 2, generator=generator),
    }
    return Transitions(**{**made, **columns})


def actor_critic(spec: PolicySpec, space: Any = ACTS, **networks: Any) -> ActorCritic:
    policy = ControlPolicy.fresh(SEES, space, spec, seed=1)
    found = {"q": QNets.of(policy, 2, 0), "v": StateValue.of(policy, 0), "temperature": Temperature(0.5)}
    found |= networks
    targets = {"q": QNets.of(policy, 2, 9), "policy": policy.copy()}
    return ActorCritic(policy, found, targets, torch.Generator().manual_seed(0))
