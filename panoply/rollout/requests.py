"""What goes into the text engine: a model with a cache, requests, and the callback between turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from panoply.policies.attention import Cache
from panoply.rollout.masks import RowMask


class Limits(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...


class CachedModel(Protocol):
    """What the engine asks of a language model; `policies.decoder.Decoder` is one."""

    training: bool

    @property
    def config(self) -> Limits: ...
    @property
    def device(self) -> torch.device: ...
    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def new_cache(self, rows: int, capacity: int) -> Cache: ...
    def train(self, mode: bool = True) -> Any: ...


@dataclass(frozen=True)
class Request:
    """One prompt and a seed for each sample of it. A seed fixes its row's random stream."""

    prompt: Sequence[int]
    seeds: Sequence[int]
    key: Any = None
    mask: RowMask | None = None
    most: int | None = None
    """Tokens of a turn of its rows, where that is fewer than `max_tokens`."""
    begun: int = 0
    """How many of the prompt's last tokens belong to the turn that goes on: a stop string may begin in them."""
    prefix: Tensor | None = None
    """[n, width] vectors that are read in place of the first n tokens of the prompt, which must have more."""


@dataclass(frozen=True)
class Turn:
    """A turn that has just ended, as `on_stop` sees it. `reason` is STOP or LENGTH."""

    row: int
    request: int
    key: Any
    turn: int
    tokens: list[int]
    """Everything so far: prompt, samples, observations."""
    start: int
    """Where this turn's samples begin in `tokens`."""
    reason: int

    @property
    def sampled(self) -> list[int]:
        return self.tokens[self.start :]


OnStop = Callable[[Sequence[Turn]], Sequence[Sequence[int] | None]]
"""Ended turns to the observations that follow them (context, not decisions), or None to end a row."""

Complete = Callable[[list[int]], bool]
"""What a turn has said so far to whether it needs no more: an end that no token or string marks."""
