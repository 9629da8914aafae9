"""A policy that changes with time: frozen copies of a network, one for each turn it has been frozen for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from panoply.policies.mlp import MLP, Weights

Timed = Callable[[NDArray[Any], NDArray[Any]], NDArray[np.float32]]
"""What acts: outputs for features and the turns they are seen in."""


class Stages(nn.Module):
    """Copies of layers for the first turns of an episode, kept as buffers, so that they are saved and never learn.

    Turns that have no copy yet are the network's of now.
    """

    frozen: Tensor
    """How many turns have theirs."""

    def __init__(self, layers: MLP, count: int):
        super().__init__()
        self.count = count
        self.register_buffer("frozen", torch.zeros((), dtype=torch.long))
        for number, pair in enumerate(layers.weights):
            for name, weight in zip(("weight", "bias"), pair, strict=True):
                self.register_buffer(f"{name}_{number}", torch.zeros(count, *weight.shape))
        self._layers = [layers]  # the policy's: neither saved nor moved from here

    def at(self, turn: int) -> Weights:
        """The weights of a turn."""
        layers = self._layers[0].weights
        if turn >= int(self.frozen):
            return layers
        return [
            (self.get_buffer(f"weight_{i}")[turn], self.get_buffer(f"bias_{i}")[turn])
            for i in range(len(layers))
        ]

    @torch.no_grad()
    def freeze(self, turn: int) -> None:
        """Keep the network of now for a turn; those before it keep theirs."""
        for number, pair in enumerate(self._layers[0].weights):
            for name, weight in zip(("weight", "bias"), pair, strict=True):
                self.get_buffer(f"{name}_{number}")[turn].copy_(weight)
        self.frozen.fill_(turn + 1)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        layers, now = self._layers[0], int(self.frozen)
        stage = turn.clamp(max=now)
        parts = {t: stage == t for t in sorted(set(stage.tolist()))}
        out = [layers.through(x[where], self.at(t)) for t, where in parts.items()]
        order = torch.cat([where.nonzero()[:, 0] for where in parts.values()])
        return torch.cat(out)[order.argsort()]

    def numpy(self) -> Timed:
        """The same as a function of arrays."""
        layers, now = self._layers[0], int(self.frozen)
        stages = [layers.numpy(self.at(t)) for t in range(now + 1)]

        def forward(x: NDArray[Any], turn: NDArray[Any]) -> NDArray[np.float32]:
            stage = np.minimum(turn, now)
            first = int(stage[0])
            if (stage == first).all():
                return stages[first](x)
            out = stages[now](x)
            for t in np.unique(stage[stage < now]).tolist():
                out[stage == t] = stages[t](x[stage == t])
            return out

        return forward
