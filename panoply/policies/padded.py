"""Attention over packed rows where there is no kernel for rows of unequal length: pieces side by side, padded.

A piece's row holds its prefix, which ends where all prefixes of its bucket end, and then its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from panoply.kernels import host

if TYPE_CHECKING:
    from panoply.policies.packing import Packing

CALL_PAIRS = 1 << 14
"""What one more call costs, in pairs of a query and a key: a bucket is split when that saves more padding."""


@dataclass(frozen=True)
class Bucket:
    """S pieces in rows of `before` places for prefixes and `after` for what is the pieces' own."""

    token: Tensor
    """[S · (before + after)] the token at each place; any, where there is none."""
    prefix: Tensor
    """[S] each prefix's length."""
    before: int
    after: int

    masks: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, window: int, dtype: torch.dtype) -> Tensor:
        """[S, 1, after, before + after], additive, made once for all layers."""
        if (window, dtype) not in self.masks:
            self.masks[window, dtype] = self._mask(window, dtype).expand(len(self.prefix), -1, -1, -1)
        return self.masks[window, dtype]

    def _mask(self, window: int, dtype: torch.dtype) -> Tensor:
        """Of one row, where all are alike. Padding on the right is in nobody's past."""
        key = torch.arange(self.before + self.after, device=self.token.device)
        query = key[self.before :, None]
        seen = key <= query
        if window:
            seen = seen & (key > query - window)
        hidden = ~seen[None]
        if bool((self.prefix < self.before).any()):
            hidden = hidden | (key < self.before - self.prefix[:, None, None])
        mask = torch.zeros(hidden.shape, dtype=dtype, device=key.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None]


@dataclass(frozen=True)
class Layout:
    """The buckets of a packing. Places are counted through all buckets, one after another."""

    buckets: Sequence[Bucket]
    query: Tensor
    """[N] the place of each token among the queries, and (`key`) of itself among the keys."""
    key: Tensor
    copies: Tensor
    """Places among the keys of copies of prefix tokens, and (`copied`) the number of that token in `prefix`."""
    copied: Tensor
    prefix: Tensor


def lay(packing: Packing) -> Layout:
    """Sort pieces into buckets of like size."""
    own = packing.queries.diff().long()
    shared = packing.keys.diff().long() - own
    listed = packing.keys[:-1].long()
    order = torch.argsort(shared * (int(own.max()) + 1) + own, stable=True)
    buckets, queries, keys, copies, sources = [], [], [], [], []
    query_base = key_base = 0
    for part in _split(shared[order], own[order]):
        chosen = order[part]
        before, after = int(shared[chosen].max()), int(own[chosen].max())
        width = before + after
        place = torch.arange(width, device=own.device)
        at = place - before + shared[chosen, None]  # index in the piece's list of keys
        there = (at >= 0) & (at < (shared + own)[chosen, None])
        token = packing.source[(listed[chosen, None] + at).clamp(0, len(packing.source) - 1)]
        buckets.append(Bucket(token.masked_fill(~there, 0).flatten(), shared[chosen], before, after))
        row = torch.arange(len(chosen), device=own.device)[:, None]
        mine = there & (place >= before)
        queries.append(((query_base + row * after + place - before)[mine], token[mine]))
        keys.append((key_base + row * width + place)[mine])
        copy = there & (place < before)
        copies.append((key_base + row * width + place)[copy])
        sources.append(token[copy])
        query_base, key_base = query_base + len(chosen) * after, key_base + len(chosen) * width
    token = torch.cat([t for _, t in queries])
    back = torch.empty_like(token)
    back[token] = torch.arange(len(token), device=token.device)
    prefix, copied = torch.unique(torch.cat(sources), return_inverse=True)
    query, key = torch.cat([q for q, _ in queries])[back], torch.cat(keys)[back]
    return Layout(buckets, query, key, torch.cat(copies), copied, prefix)


def _split(shared: Tensor, own: Tensor) -> list[slice]:
    """Spans of pieces, in order, cut wherever that saves more padding than one more call costs."""

    def cost(a: int, b: int) -> int:
        after = int(own[a:b].max())
        return (b - a) * after * (int(shared[a:b].max()) + after)

    pending, done = [(0, len(own))], []
    while pending:
        a, b = pending.pop()
        whole = cost(a, b)
        cuts = sorted({a + (b - a) * i // 8 for i in range(1, 8)} - {a})
        best = min(((cost(a, c) + cost(c, b), c) for c in cuts), default=(whole, b))
        if whole - best[0] > CALL_PAIRS:
            pending += [(best[1], b), (a, best[1])]
        else:
            done.append(slice(a, b))
    return done


class _Lay(torch.autograd.Function):
    """[N, heads + 2 · kv_heads, size] to queries, keys and values of every bucket, [S, length, heads, size] each."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, layout: Layout) -> tuple[Tensor, ...]:
        ctx.layout, ctx.shape, ctx.heads = layout, qkv.shape, heads
        shared = (qkv.shape[1] - heads) // 2
        found: list[Tensor] = []
        for bucket in layout.buckets:
            rows = qkv.index_select(0, bucket.token).view(len(bucket.prefix), -1, *qkv.shape[1:])
            q, k, v = torch.split(rows, [heads, shared, shared], dim=2)
            found += [q[:, bucket.before :], k, v]
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        layout: Layout = ctx.layout
        if fast := host.compiled(slopes[0]):
            whole = slopes[0].new_zeros(ctx.shape)
            for i, bucket in enumerate(layout.buckets):
                given = map(host.array, slopes[3 * i : 3 * i + 3])
                fast.unlay(host.array(bucket.token), bucket.before, *given, host.array(whole))
            return whole, None, None
        out = slopes[0].new_empty(ctx.shape)
        shared = (ctx.shape[1] - ctx.heads) // 2
        spans = (0, ctx.heads), (ctx.heads, ctx.heads + shared), (ctx.heads + shared, ctx.shape[1])
        for kind, (a, b) in enumerate(spans):
            flat = [s.reshape(-1, *s.shape[2:]) for s in slopes[kind::3]]
            g = flat[0] if len(flat) == 1 else torch.cat(flat)
            own = g.index_select(0, layout.query if kind == 0 else layout.key)
            if kind and len(layout.copies):
                total = own.index_select(0, layout.prefix)
                total.index_add_(0, layout.copied, g.index_select(0, layout.copies))
                own.index_copy_(0, layout.prefix, total)
            out[:, a:b] = own
        return out, None, None


class _Unlay(torch.autograd.Function):
    """Every bucket's [S, after, heads, size] to [N, heads, size]."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, *mixed: Tensor) -> Tensor:
        ctx.layout, ctx.shapes = layout, [m.shape for m in mixed]
        flat = [m.reshape(-1, *m.shape[2:]) for m in mixed]
        return (flat[0] if len(flat) == 1 else torch.cat(flat)).index_select(0, layout.query)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        sizes = [s[0] * s[1] for s in ctx.shapes]
        whole = g.new_zeros(sum(sizes), *g.shape[1:]).index_copy_(0, ctx.layout.query, g)
        parts = (p.view(s) for p, s in zip(torch.split(whole, sizes), ctx.shapes, strict=True))
        return None, *parts


def attend(qkv: Tensor, heads: int, layout: Layout, window: int) -> Tensor:
    """[N, heads + 2 · kv_heads, size] to [N, heads, size]."""
    laid: tuple[Tensor, ...] = _Lay.apply(qkv, heads, layout)  # type: ignore[no-untyped-call]
    mixed = []
    for i, bucket in enumerate(layout.buckets):
        q, k, v = (x.transpose(1, 2) for x in laid[3 * i : 3 * i + 3])
        mask = bucket.mask(window, q.dtype)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=k.shape[1] < heads
        )
        mixed.append(out.transpose(1, 2))
    found: Tensor = _Unlay.apply(layout, *mixed)  # type: ignore[no-untyped-call]
    return found
