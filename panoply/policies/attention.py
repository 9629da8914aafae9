"""Who sees whom in padded rows and in a cache, the attention that follows from it, maps of it, and the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged
from panoply.policies.architectures import ARCHITECTURES
from panoply.policies.scoring import has_triton

if TYPE_CHECKING:
    from panoply.policies.decoder import Block, Decoder
    from panoply.policies.text import TextPolicy


HEAD_SIZE = 256
"""The most dimensions of a head that kernels hold; sizes between powers of two are padded in registers."""


@dataclass(frozen=True)
class Focus:
    """How a layer's queries look at keys: how far back, and what becomes of a product of the two.

    The score is scale · qᵀk, or with a cap c it is c · tanh(scale · qᵀk / c).
    """

    window: int = 0
    """How many positions are seen, the query's own included; 0: all."""
    scale: float | None = None
    """None: one over the root of the head size."""
    cap: float = 0.0


class Visibility:
    """Which keys a query sees, as additive masks, each built once per forward pass for all layers.

    Without segments a query sees the keys of earlier positions. Segment 0 is a prefix that all see, s > 0 a
    suffix that only itself sees, -1 padding, which sees padding. With a cache, slot j holds position j.
    """

    def __init__(self, positions: Tensor, segments: Tensor | None, cached: bool, dtype: torch.dtype):
        self.positions, self.segments, self.cached, self.dtype = positions, segments, cached, dtype
        here = torch.arange(positions.shape[1], device=positions.device)
        self.causal = not cached and segments is None and bool((positions == here).all())
        self._masks: dict[tuple[int, int], Tensor] = {}

    def mask(self, window: int, keys: int, whole: bool = False) -> Tensor | None:
        """[B, 1, T, keys]; None where plain causal attention is the same, unless the mask is wanted on the `whole`."""
        window = 0 if window >= keys else window
        if self.causal and not window and not whole:
            return None
        if (window, keys) not in self._masks:
            self._masks[window, keys] = self.build(window, keys)
        return self._masks[window, keys]

    def build(self, window: int, keys: int) -> Tensor:
        query = self.positions[:, :, None]
        key = torch.arange(keys, device=query.device) if self.cached else self.positions[:, None, :]
        visible = key <= query
        if window:
            visible = visible & (key > query - window)
        if self.segments is not None:
            own, other = self.segments[:, :, None], self.segments[:, None, :]
            visible = visible & ((own == other) | ((other == 0) & (own > 0)))
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=query.device)
        return mask.masked_fill_(~visible, float("-inf"))[:, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, focus: Focus, sinks: Tensor | None = None) -> Tensor:
        """[B, T, heads, size] queries and [B, keys, kv_heads, size] keys and values to [B, T, heads, size]."""
        mask = self.mask(focus.window, k.shape[1], whole=bool(focus.cap) or sinks is not None)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return attend(q, k, v, mask, focus.scale, focus.cap, sinks).transpose(1, 2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention, causal without a mask. Query heads may share key heads; how to say so decides the speed."""
    rows, heads, length, size = q.shape
    share = heads // k.shape[1]
    if cap or sinks is not None:
        assert mask is not None
        return written_out(q, k, v, mask, size**-0.5 if scale is None else scale, cap, sinks)
    if length == 1 and mask is not None and q.device.type == "cpu":
        # One query a row is no work for an attention kernel: two products and what is between them are faster.
        folded = q.reshape(-1, share, size)
        flat = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        k, v = flat
        scores = torch.bmm(folded * (size**-0.5 if scale is None else scale), k.transpose(1, 2)).view(
            rows, -1, k.shape[1]
        )
        weights = scores.add_(mask[:, 0]).softmax(-1).view(len(k), share, -1)
        return torch.bmm(weights, v).view(rows, heads, 1, size)
    if share > 1 and length == 1 and mask is not None:
        # One query a row: the heads that share keys are so many queries of one head.
        folded = F.scaled_dot_product_attention(
            q.view(rows, -1, share, size), k, v, attn_mask=mask, scale=scale
        )
        return folded.reshape(rows, heads, 1, size)
    if share > 1 and q.is_cuda:
        # With `enable_gqa` CUDA falls back to kernels that are three times slower under a mask.
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    grouped = k.shape[1] < heads
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, cap: float, sinks: Tensor | None = None
) -> Tensor:
    """Attention whose scores are capped before they are masked, or with sinks, [heads], each one score more that stands
    for no key: two products, and what is between them in float32."""
    rows, heads, length, size = q.shape
    folded = q.reshape(rows, k.shape[1], -1, size)  # heads that share keys are so many queries of one head
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (folded @ k.transpose(2, 3)).to(wide) * scale
    if cap:
        scores = (scores / cap).tanh() * cap
    scores = scores.view(rows, heads, length, -1) + mask
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.to(wide).view(1, heads, 1, 1).expand(rows, -1, length, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    weights = weights.to(q.dtype).reshape(folded.shape[:3] + k.shape[2:3])
    return (weights @ v).view(rows, heads, length, size)


@torch.no_grad()
def maps(policy: TextPolicy, experience: Experience, block: int, head: int | None = None) -> Ragged:
    """A row a decision: the weights, summing to 1, with which it attends to each token before it in block 1, 2, …

    Where heads have sinks, the sum is less by what they take. Of one head, or the mean over heads. One context at a
    time and without kernels: for looking, and for small inputs.
    """
    config: Any = policy.model.config
    if not 0 <= (head or 0) < config.heads:
        raise PanoplyError(
            f"There is no attention of block {block}, head {head}, in {config.layers} blocks of {config.heads} heads, "
            "which are counted from 1 and from 0."
        )
    tokens, at = tokens_of(experience), experience["position"]
    rows: list[Tensor] = [torch.zeros(0)] * len(experience)
    for context in sorted(set(experience["context"].tolist())):
        here = (experience["context"] == context).nonzero().flatten()
        (every,) = whole_maps(policy, tokens[context][: int(at[here].max())][None], [block])
        weights = every[0].mean(0) if head is None else every[0, head]
        for row in here.tolist():
            rows[row] = weights[int(at[row]) - 1, : int(at[row])].cpu()
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Ragged(torch.cat([torch.zeros(0), *rows]), offsets)


def tokens_of(experience: Experience) -> Ragged:
    """What each context holds, where that is tokens alone."""
    if "vectors" in experience.context:
        raise PanoplyError("Attention maps are of tokens alone, and these answers have vectors among them.")
    return experience.context.ragged("tokens")


@torch.no_grad()
def whole_maps(policy: TextPolicy, tokens: Tensor, blocks: Sequence[int]) -> list[Tensor]:
    """Of each of some blocks [rows, heads, length, length]: how much every token attends to every one up to itself.

    tokens   [rows, length], all of one length
    """
    model: Any = policy.model
    every, config = getattr(model, "blocks", None), model.config
    if every is None:
        raise PanoplyError(f"Attention maps need a layout that runs natively: {', '.join(ARCHITECTURES)}.")
    for block in blocks:
        if not 1 <= block <= config.layers:
            raise PanoplyError(
                f"There is no attention of block {block} in {config.layers} blocks of {config.heads} heads, which are "
                "counted from 1 and from 0."
            )
    tokens = tokens.to(policy.device)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None].expand_as(tokens)
    _, tapped = model.hidden_states(tokens, positions, taps=tuple(sorted(block - 1 for block in set(blocks))))
    return [_weights(model, every[block - 1], tapped[block - 1], positions) for block in blocks]


def _weights(model: Decoder, block: Block, x: Tensor, positions: Tensor) -> Tensor:
    """[rows, heads, length, length] attention of a block, from the states before it."""
    attend, before = block.self_attn, block.norms[0]
    normed = x if before is None else before(x)
    q, k, _ = attend.project(normed, model.rotations(positions, x.dtype)[attend.table])
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    focus = attend.focus
    scores = torch.einsum("bqhs,bkhs->bhqk", q.float(), k.float()) * (focus.scale or attend.head_dim**-0.5)
    if focus.cap:
        scores = (scores / focus.cap).tanh() * focus.cap
    sight = Visibility(positions, None, False, torch.float32)
    scores = scores + sight.build(focus.window, x.shape[1])
    if attend.sinks is None:
        return scores.softmax(-1)
    sink = attend.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]


# ------------------------------------------------------------------ keys and values


class Cache:
    """Preallocated keys and values, [layers, rows, capacity, kv_heads, head_dim] each, that a forward pass writes
    through `append`.

    A forward pass over B rows uses the first B rows. Call `begin` with its positions before it. Slots past a
    row's last token hold garbage, zeros at first: no query sees it, and real tokens overwrite it.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        self.rows, self.capacity = rows, capacity
        like = torch.zeros((), dtype=dtype, device=device)
        self.keys, self.values = (_zeros(like, layers, rows, capacity, kv_heads, head_dim) for _ in range(2))
        self._rows = torch.arange(rows, device=device)[:, None]
        self._slots = self._rows[:0]
        self._width = 0

    def begin(self, positions: Tensor, width: int | None = None) -> None:
        """Say where the next forward pass writes: [B, T] positions, and how many slots its queries may see.

        Without a `width` it is read off the positions, which on a GPU waits for it.
        """
        self._width = int(positions.max()) + 1 if width is None else width
        if self._width > self.capacity:
            self.grow(max(self._width, 2 * self.capacity))
        self._slots = positions

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write [B, kv_heads, T, head_dim]; give views of what is seen, [B, kv_heads, width, head_dim]."""
        at = (self._rows[: len(k)], self._slots)
        self.keys[layer][at], self.values[layer][at] = k.transpose(1, 2), v.transpose(1, 2)
        return self.seen(layer, len(k))

    def seen(self, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Views of what the first rows see, [rows, kv_heads, width, head_dim]."""
        keys, values = (x[layer, :rows, : self._width].transpose(1, 2) for x in (self.keys, self.values))
        return keys, values

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """A layer's whole buffers, [rows, capacity, kv_heads, head_dim]."""
        return self.keys[index], self.values[index]

    def grow(self, capacity: int) -> None:
        """Make room for more positions. Views given out before stay with the old buffers."""
        self.keys, self.capacity = _wider(self.keys, capacity), capacity
        self.values = _wider(self.values, capacity)

    def take(self, rows: Tensor, width: int, capacity: int) -> Cache:
        """A copy of some rows: their first `width` positions, with room for `capacity`."""
        like = self.keys
        heads, size = like.shape[3:]
        copy = Cache(len(like), len(rows), heads, capacity, size, like.dtype, like.device)
        copy.put(torch.arange(len(rows), device=rows.device), self, rows, width)
        return copy

    def put(self, at: Tensor, source: Cache, rows: Tensor, width: int) -> None:
        """Copy the first `width` positions of `rows` of `source`, which may repeat, to rows `at` of this one.

        This is how one prefilled prompt reaches its whole group, and, with itself as source, how gaps close.
        """
        if self.keys.is_cuda and has_triton():
            self.put_tokens(at, source.flat, rows * source.capacity, torch.full_like(rows, width), width)
            return
        if width > self.capacity:
            self.grow(max(width, 2 * self.capacity))
        for mine, theirs in ((self.keys, source.keys), (self.values, source.values)):
            for target, given in zip(mine[:, :, :width], theirs[:, :, :width], strict=True):
                target.index_copy_(0, at, given.index_select(0, rows))

    def put_tokens(
        self, at: Tensor, source: tuple[Tensor, Tensor], first: Tensor, count: Tensor, longest: int
    ) -> None:
        """On a GPU: `count[i]` tokens from `first[i]` on of [layers, tokens, kv_heads, head_dim] keys and values, to
        the beginning of row `at[i]`. None has more than `longest`."""
        from panoply.kernels.copying import Tokens, copy

        if longest > self.capacity:
            self.grow(max(longest, 2 * self.capacity))
        copy(Tokens(*source), first, count, Tokens(*self.flat), at, self.capacity, longest)

    @property
    def flat(self) -> tuple[Tensor, Tensor]:
        """Keys and values as tokens one after another, [layers, rows · capacity, kv_heads, head_dim]."""
        return self.keys.flatten(1, 2), self.values.flatten(1, 2)


class Newest:
    """One new token a row, on a GPU, in a cache's place: a kernel puts its keys and values into the cache and looks at
    no more than what stands before it, where a mask would be as wide as the cache.

    positions   [rows], where the tokens are
    holders     rows that hold the beginnings of others, and how much of them (`kernels.decode.decode_attention`)
    """

    def __init__(self, cache: Cache, positions: Tensor, holders: tuple[Tensor, Tensor]):
        self.cache, self.positions, self.holders = cache, positions, holders

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, focus: Focus, sinks: Tensor | None = None
    ) -> Tensor:
        """[rows, 1, heads, size] rotated queries and [rows, 1, kv_heads, size] keys and values, to queries' shape."""
        from panoply.kernels.decode import Stream, decode_attention

        qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
        seen, nothing = self.cache.layer(layer), Stream(0.0)
        found = decode_attention(
            qkv, None, *seen, self.positions, self.holders, None, nothing, focus, sinks=sinks
        )
        return found.view_as(q)


class Above:
    """The layers of a cache from `first` on, as a second model's own."""

    def __init__(self, cache: Cache, first: int):
        self.cache, self.first = cache, first

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.append(self.first + layer, k, v)


def _zeros(like: Tensor, layers: int, rows: int, capacity: int, heads: int, size: int) -> Tensor:
    """[layers, rows, capacity, heads, size]; on a CPU a head's positions lie together, as batched products want them.

    Zeros, not empty: an invisible key has weight 0, and 0 x NaN is NaN.
    """
    if like.device.type == "cpu":
        return like.new_zeros(layers, rows, heads, capacity, size).transpose(2, 3)
    return like.new_zeros(layers, rows, capacity, heads, size)


def _wider(buffer: Tensor, capacity: int) -> Tensor:
    layers, rows, old, heads, size = buffer.shape
    found = _zeros(buffer, layers, rows, capacity, heads, size)
    found[:, :, :old] = buffer
    return found
