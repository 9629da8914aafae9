"""A model of who acted: what somebody like that would have done in a state (a conditional variational autoencoder)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from panoply.policies.control import ControlPolicy
from panoply.policies.mlp import MLP, Features
from panoply.seeds import torch_rng

LOG_STD = (-4.0, 15.0)
PRIOR = 0.5
"""Without an action to encode, a code is drawn from the prior within these bounds (BCQ, arXiv 1812.02900)."""


class BehaviourModel(nn.Module):
    """An encoder q(z|s,a) of twice as many dimensions as actions have, and a decoder of (s, z) to an action.

    Actions are in their units, −1 to 1; noise is given, so the same noise gives the same action.
    """

    def __init__(self, features: Features, encoder: MLP, decoder: MLP):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self._features = [features]  # the policy's: neither saved nor moved from here

    @classmethod
    def of(cls, policy: ControlPolicy, hidden: Sequence[int], seed: int) -> BehaviourModel:
        features = policy.model.features
        actions = policy.head.unit(torch.zeros(1, *policy.action.shape, device=policy.device)).shape[-1]
        code = 2 * actions
        encoder = MLP(features.size + actions, hidden, 2 * code, "relu")
        decoder = MLP(features.size + code, hidden, actions, "relu")
        encoder.initialise(torch_rng("encoder", seed))
        decoder.initialise(torch_rng("decoder", seed))
        return cls(features, encoder, decoder).to(policy.device)

    @property
    def code(self) -> int:
        """Dimensions of z."""
        return int(self.encoder.layers[-1].out_features) // 2  # type: ignore[arg-type]

    def encode(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-deviation of q(z|s,a)."""
        out = self.encoder(torch.cat([self._features[0](observation), action], -1))
        mean, log_std = out.chunk(2, -1)
        return mean, log_std.clamp(*LOG_STD)

    def decode(self, observation: Tensor, code: Tensor) -> Tensor:
        return self.decoder(torch.cat([self._features[0](observation), code], -1)).tanh()  # type: ignore[no-any-return]

    def near(self, observation: Tensor, action: Tensor, noise: Tensor) -> Tensor:
        """What the behaviour would have done that is most like this action."""
        mean, log_std = self.encode(observation, action)
        return self.decode(observation, mean + log_std.exp() * noise)

    def draw(self, observation: Tensor, noise: Tensor) -> Tensor:
        """What the behaviour would have done."""
        return self.decode(observation, noise.clamp(-PRIOR, PRIOR))


def code_kl(mean: Tensor, log_std: Tensor) -> Tensor:
    """KL(q(z|s,a) ‖ N(0, 1)) of each row, mean over the dimensions of z."""
    return 0.5 * (mean.square() + (2 * log_std).exp() - 2 * log_std - 1).mean(-1)
