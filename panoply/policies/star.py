"""One network for all things of a kind, such as stores: a graph network whose graph is a star."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from panoply.errors import PanoplyError
from panoply.policies.mlp import MLP, Activation, Forward
from panoply.worlds.control.world import Box, Space

TASTE = 2.0
"""The deviation of a linear node's first outputs, of numbers that deviate by 1."""


class StarLayers(nn.Module):
    """Outputs of a row of nodes that share their weights, and of the hub that they have in common.

    Every node is embedded; the hub hears the mean of all embeddings; a node's output comes from its own embedding and
    what the hub knows, and further outputs from the hub alone. The order of nodes does not matter, and as many weights
    serve any number of them.

    Without hidden layers there is no hub, and a node's output is θ·x of its own numbers x. Where nodes are the actions
    to be chosen from, that makes a softmax over features of actions. It begins with some taste, and not at 0.
    """

    def __init__(
        self,
        space: Space,
        hidden: Sequence[int],
        outputs: int,
        activation: Activation,
        gain: float | None = 1.0,
    ):
        super().__init__()
        self.count, self.width = space.nodes if isinstance(space, Box) else (0, 0)
        if self.count < 1 or outputs < self.count or (outputs > self.count and not hidden):
            raise PanoplyError(
                "policy.shared is for things of one kind, such as the stores of inventory, with one number of an "
                "action for each, and needs hidden layers (policy.hidden) where actions have other numbers too."
            )
        assert isinstance(space, Box)
        self.embed: MLP | None = None
        self.hub: MLP | None = None
        if not hidden:
            self.each = MLP(self.width, (), 1, activation)
            return
        *inner, size = hidden
        heard = size + space.size - self.count * self.width
        self.embed = MLP(self.width, inner, size, activation)
        self.each = MLP(size + heard, hidden, 1, activation, gain)
        self.hub = (
            MLP(heard, hidden, outputs - self.count, activation, gain) if outputs > self.count else None
        )

    def initialise(self, generator: torch.Generator) -> None:
        if self.embed is None:
            self.each.initialise(generator)
            (weight, _), *_ = self.each.weights
            torch.nn.init.normal_(weight, std=TASTE / self.width**0.5, generator=generator)
            return
        for layers in (self.embed, self.each, self.hub):
            if layers is not None:
                layers.initialise(generator)

    def last(self) -> list[nn.Parameter]:
        """The weights that outputs come from."""
        return [*self.each.last(), *(self.hub.last() if self.hub is not None else ())]

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is None:
            return self.each(x.reshape(-1, self.width)).view(len(x), self.count)  # type: ignore[no-any-return]
        known = self.embed(x[:, : self.count * self.width].reshape(-1, self.width))
        heard = torch.cat([known.view(len(x), self.count, -1).mean(1), x[:, self.count * self.width :]], -1)
        around = heard.repeat_interleave(self.count, 0)
        out = self.each(torch.cat([known, around], -1)).view(len(x), self.count)
        return out if self.hub is None else torch.cat([out, self.hub(heard)], -1)

    def numpy(self) -> Forward:
        """The same as a function of arrays."""
        each, count, width = self.each.numpy(), self.count, self.width
        if self.embed is None:
            return lambda x: each(x.reshape(len(x), count, width))[..., 0]
        embed = self.embed.numpy()
        hub = self.hub.numpy() if self.hub is not None else None

        def forward(x: NDArray[Any]) -> NDArray[np.float32]:
            known = embed(x[:, : count * width].reshape(len(x), count, width))
            heard = np.concatenate([known.mean(1), x[:, count * width :]], -1)
            around = np.broadcast_to(heard[:, None], (len(x), count, heard.shape[-1]))
            out = each(np.concatenate([known, around], -1))[..., 0]
            return out if hub is None else np.concatenate([out, hub(heard)], -1)

        return forward
