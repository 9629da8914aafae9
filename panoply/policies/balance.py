"""Policies that take a coefficient β beside the observation, and the network that chooses it in every state."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from panoply.policies.heads import Gaussian
from panoply.policies.mlp import MLP, Activation, Forward
from panoply.worlds.control.world import Box

WIDTH, BASE = 6, 10_000.0


def embedded(beta: Tensor) -> Tensor:
    """[rows] as sines and cosines: e_2i = sin(β/n^(2i/d)), e_2i+1 = cos of the same, d = 6 and n = 10,000."""
    angles = beta[:, None] * _rates().to(beta)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


def _rates() -> Tensor:
    return BASE ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)


class Balance(nn.Module):
    """π_b(β|s): a squashed normal between the two ends of a range."""

    def __init__(
        self, inputs: int, hidden: tuple[int, ...], activation: Activation, betas: tuple[float, float]
    ):
        super().__init__()
        self.head = Gaussian(Box((1,), (-1.0,), (1.0,)), squash=True, std="state", log_std=0.0)
        self.layers = MLP(inputs, hidden, self.head.width, activation, gain=0.01)
        self.low, self.high = betas

    def scaled(self, share: Tensor) -> Tensor:
        """From −1 … 1 to the range."""
        return self.low + (self.high - self.low) * (share + 1) / 2

    def forward(self, features: Tensor) -> Tensor:
        """The β that acts: in the middle of the distribution."""
        return self.scaled(self.layers(features)[:, 0].tanh())

    def beside(self, features: Tensor, beta: Tensor | None) -> Tensor:
        """Features, and beside them the embedding of β: the one given, or else the one that acts."""
        return torch.cat([features, embedded(self(features) if beta is None else beta)], -1)

    def draw(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """β as the noise makes it, through which gradients flow, and its log-density in units of −1 … 1."""
        share, logp = self.head.draw(self.layers(features), noise)
        return self.scaled(share[:, 0]), logp

    def numpy(self) -> Forward:
        """From features to the embedding of the β that acts."""
        layers, rates = self.layers.numpy(), _rates().numpy()

        def forward(features: NDArray[np.float32]) -> NDArray[np.float32]:
            share = np.tanh(layers(features)[:, :1])
            angles = (self.low + (self.high - self.low) * (share + 1) / 2) * rates
            return (
                np.stack([np.sin(angles), np.cos(angles)], -1)
                .reshape(len(features), WIDTH)
                .astype(np.float32)
            )

        return forward
