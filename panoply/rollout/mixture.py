"""A mixture of two language models: logits (1−β)·a + β·b, to sample from and to score.

With states h and output weights W that is one product, [(1−β)·h_a, β·h_b]·[W_a, W_b]ᵀ. So a mixture is a model whose
states are those of both side by side, and everything that reads states works on it as on any other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.policies.attention import Above, Cache
from panoply.policies.scoring import wide_product
from panoply.policies.text import TextPolicy


def mixed(policy: TextPolicy, other: TextPolicy, share: float) -> TextPolicy:
    """The policy with a share of another's logits, always at the weights of both as they are."""
    if policy.thoughts is not None:
        raise PanoplyError("A mixture of two models has no thoughts: both would have to read one's vectors.")
    model: Any = Mixture(policy.model, other.model, share)
    return TextPolicy(model, policy.tokenizer, shared=policy.shared)


@dataclass(frozen=True)
class Sizes:
    """What is asked of a model's config."""

    vocab_size: int
    max_positions: int
    width: int
    layers: int


class Mixture:
    """Two models of one layout, fed the same tokens; one cache holds the layers of both. Decoded eagerly."""

    softcap = 0.0

    def __init__(self, first: Any, second: Any, share: float):
        one, two = first.config, second.config
        same = ("vocab_size", "layers", "kv_heads", "head_dim", "max_positions")
        if any(getattr(one, name) != getattr(two, name) for name in same) or first.softcap or second.softcap:
            raise PanoplyError("A mixture is of two models of one layout, whose logits are not capped.")
        self.first, self.second, self.share = first, second, share
        self.config = Sizes(one.vocab_size, one.max_positions, one.width + two.width, one.layers)
        self.device, self.dtype, self.packs = first.device, first.dtype, bool(getattr(first, "packs", False))
        self.training = False

    @property
    def head_weight(self) -> Tensor:
        return torch.cat([self.first.head_weight, self.second.head_weight], dim=1)

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        taps: Collection[int] = (),
        **packed: Any,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if taps:
            raise PanoplyError("A mixture of two models has no blocks of its own to look into.")
        above: Any = None if cache is None else Above(cache, self.config.layers)
        first, _ = self.first.hidden_states(tokens, positions, segments, cache, **packed)
        second, _ = self.second.hidden_states(tokens, positions, segments, above, **packed)
        return torch.cat([(1 - self.share) * first, self.share * second], dim=-1), {}

    def hidden(
        self, tokens: Tensor, positions: Tensor, segments: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        return self.hidden_states(tokens, positions, segments, cache)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        flat = wide_product(hidden.reshape(-1, hidden.shape[-1]), self.head_weight.t())
        return flat.view(*hidden.shape[:-1], -1)

    def new_cache(self, rows: int, capacity: int) -> Cache:
        one = self.first.config
        return Cache(2 * one.layers, rows, one.kv_heads, capacity, one.head_dim, self.dtype, self.device)

    def train(self, mode: bool = True) -> Mixture:
        return self
