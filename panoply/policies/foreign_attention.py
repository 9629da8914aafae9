"""Attention in models that transformers runs, by this library's kernels where transformers lets it be replaced.

transformers asks a function for the attention of a layer, by name. Under ours it asks whoever has begun the pass: a
packed row, or one new token of every row; every other pass is torch's, as before. So rows of training are packed
without padding, and a token that is decoded looks at what stands before it, and not, through a mask, at all that a
cache has room for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from panoply.policies.attention import Focus, Newest
from panoply.policies.foreign_folder import quiet_transformers

if TYPE_CHECKING:
    from panoply.policies.packing import Packing

NAME = "panoply"
BESIDE = ("position_bias", "softcap", "s_aux", "sinks")
"""What some models add to scores: such a layer is left to transformers."""


@dataclass(frozen=True)
class Asked:
    """What a layer asks with: [B, heads, T, size] queries, keys and values, and what scores are multiplied by."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    beside: bool
    """Whether anything else would come into scores (`BESIDE`)."""

    def by_token(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same as [B, T, heads, size]."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)


class Look(Protocol):
    """What stands in for attention while a pass is under way."""

    def attend(self, layer: int, asked: Asked) -> Tensor:
        """[B, T, heads, size]."""


_look: ContextVar[Look | None] = ContextVar("look", default=None)


@contextmanager
def looking(look: Look | None) -> Iterator[None]:
    """Let a pass attend so; with None as torch does."""
    before = _look.set(look)
    try:
        yield
    finally:
        _look.reset(before)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: [B, heads, T, size] each, to [B, T, heads, size], and no weights."""
    if (look := _look.get()) is not None:
        layer: Any = getattr(module, "layer_idx", None)
        beside = any(more.get(name) is not None for name in BESIDE)
        return look.attend(layer, Asked(query, key, value, scaling, beside)), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    given: tuple[Any, ...] = (module, query, key, value, attention_mask)
    found: Tensor = sdpa_attention_forward(*given, scaling=scaling, **more)[0]
    return found, None


def take_over(model: Any) -> bool:
    """Have a model of transformers ask `attention`, if it asks torch now. False where it, or transformers, will not."""
    if model.config._attn_implementation not in ("sdpa", NAME):
        return False
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
        with quiet_transformers():
            model.set_attn_implementation(NAME)
    except (ImportError, AttributeError, KeyError, ValueError):
        return False
    return bool(model.config._attn_implementation == NAME)


@dataclass
class Routed:
    """Watches one pass: which layers ask with just the keys and values that a cache has given them, and nothing else.

    What it gives them is nothing that counts.
    """

    given: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    layers: set[int] = field(default_factory=set)

    def attend(self, layer: int, asked: Asked) -> Tensor:
        k, v = self.given.get(layer, (None, None))
        if asked.k is k and asked.v is v and asked.k.shape == asked.v.shape and not asked.beside:
            self.layers.add(layer)
        return asked.q.transpose(1, 2)


@dataclass(frozen=True)
class PackedRow:
    """Pieces of one row that see themselves and their prefix."""

    packing: Packing
    windows: tuple[int, ...]
    """How many positions each layer sees, 0 for all."""

    def attend(self, layer: int, asked: Asked) -> Tensor:
        return self.packing.attend(*asked.by_token(), Focus(self.windows[layer], asked.scale))


@dataclass(frozen=True)
class NewestToken:
    """One token a row, and a cache that holds what stands before it."""

    newest: Newest
    windows: tuple[int, ...]

    def attend(self, layer: int, asked: Asked) -> Tensor:
        return self.newest.attend(layer, *asked.by_token(), Focus(self.windows[layer], asked.scale))
