"""Networks beside a control policy that judge what it does: Q(s, a), V(s), and a temperature."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from panoply.policies.control import ControlPolicy
from panoply.policies.mlp import MLP, Features
from panoply.seeds import torch_rng


class QNets(nn.Module):
    """Several Q(s, a) of the policy's widths, each a net of its own (one batched product is slower on a CPU)."""

    def __init__(self, features: Features, nets: list[MLP]):
        super().__init__()
        self.nets = nn.ModuleList(nets)
        self._features = [features]  # the policy's: neither saved nor moved from here

    @classmethod
    def of(cls, policy: ControlPolicy, count: int, seed: int) -> QNets:
        features, spec = policy.model.features, policy.spec
        actions = policy.head.unit(torch.zeros(1, *policy.action.shape, device=policy.device)).shape[-1]
        nets = [MLP(features.size + actions, spec.hidden, 1, spec.activation) for _ in range(count)]
        for i, net in enumerate(nets):
            net.initialise(torch_rng("q", seed, i))
        return cls(features, nets).to(policy.device)

    def forward(self, observation: Tensor, action: Tensor) -> list[Tensor]:
        """A value of each row by each net; actions in their units."""
        x = torch.cat([self._features[0](observation), action], -1)
        return [net(x).squeeze(-1) for net in self.nets]

    def first(self, observation: Tensor, action: Tensor) -> Tensor:
        """The first net's value alone."""
        x = torch.cat([self._features[0](observation), action], -1)
        return self.nets[0](x).squeeze(-1)  # type: ignore[no-any-return]

    def least(self, observation: Tensor, action: Tensor) -> Tensor:
        """The most cautious net's value."""
        values = self(observation, action)
        least: Tensor = values[0]
        for value in values[1:]:
            least = torch.where(value < least, value, least)  # the minimum, with less to do backwards
        return least


class StateValue(nn.Module):
    """V(s)."""

    def __init__(self, features: Features, net: MLP):
        super().__init__()
        self.net = net
        self._features = [features]

    @classmethod
    def of(cls, policy: ControlPolicy, seed: int) -> StateValue:
        features, spec = policy.model.features, policy.spec
        net = MLP(features.size, spec.hidden, 1, spec.activation)
        net.initialise(torch_rng("v", seed))
        return cls(features, net).to(policy.device)

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(self._features[0](observation)).squeeze(-1)  # type: ignore[no-any-return]


class ActionNets(nn.Module):
    """Several Q(s, ·) of the policy's widths, a value for each of n actions; there may be none of them."""

    def __init__(self, nets: list[nn.Module]):
        super().__init__()
        self.nets = nn.ModuleList(nets)

    @classmethod
    def of(cls, policy: ControlPolicy, count: int, seed: int) -> ActionNets:
        nets: list[nn.Module] = []
        for i in range(count):
            net = MLP(
                policy.model.features.size, policy.spec.hidden, policy.head.width, policy.spec.activation
            )
            net.initialise(torch_rng("rung", seed, i))
            nets.append(_Featured(policy.model.features, net))
        return cls(nets).to(policy.device)


class _Featured(nn.Module):
    """A net on the policy's features, which are neither saved nor moved from here."""

    def __init__(self, features: Features, net: MLP):
        super().__init__()
        self.net = net
        self._features = [features]

    def forward(self, observation: Tensor) -> Tensor:
        return self.net(self._features[0](observation))  # type: ignore[no-any-return]


class Temperature(nn.Module):
    """α > 0, learned as its logarithm, or α ≥ 0, as it was given."""

    value: Tensor

    def __init__(self, start: float, learned: bool = True):
        super().__init__()
        self.learned = learned
        if learned:
            self.log = nn.Parameter(torch.tensor(math.log(start)))
        else:
            self.register_buffer("value", torch.tensor(float(start)))

    def forward(self) -> Tensor:
        return self.log.detach().exp() if self.learned else self.value
