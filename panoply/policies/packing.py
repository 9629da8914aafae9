"""Packed rows: all sequences end to end without padding, attended with torch's variable-length kernel where it is.

A suffix's keys are its prefix's and its own: keys and values, a small part of the work, are copied to each suffix, and
everything else of a prefix is computed once. Where there is no kernel for rows of unequal length, pieces lie side by
side, padded: a piece's row holds its prefix, which ends where all prefixes of its bucket end, and then its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from panoply.experience import moved
from panoply.kernels import host
from panoply.policies.attention import Focus, written_out
from panoply.policies.scoring import has_triton


@dataclass(frozen=True)
class Packing:
    """Pieces of a packed row of N tokens: piece i has queries `queries[i] : queries[i + 1]` of the row, and keys
    `keys[i] : keys[i + 1]` of a list of K, causal from its end.
    """

    queries: Tensor
    keys: Tensor
    prefixes: Tensor
    """The token that a piece's first key is of, where it has keys of a prefix: those stand there, one after another."""
    longest: tuple[int, int]
    """The most queries and the most keys of a piece."""
    source: Tensor
    """[K] the token each key is of."""
    places: Tensor
    """[K] where in the list keys stand, by the token they are of: token i's are `places[bounds[i] : bounds[i + 1]]`."""
    bounds: Tensor

    @property
    def pieces(self) -> int:
        return len(self.prefixes)

    def to(self, device: torch.device | str) -> Packing:
        there = {
            f.name: moved(v, device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        return Packing(longest=self.longest, **there)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, focus: Focus, sinks: Tensor | None = None) -> Tensor:
        """[1, N, heads, size] queries and [1, N, kv_heads, size] keys and values to [1, N, heads, size]."""
        qkv = torch.cat([q[0], k[0], v[0]], dim=1)
        if not _has_kernel(q):
            return attend(qkv, q.shape[2], self.layout, focus, sinks)[None]
        still = q.new_zeros(q.shape[1], q.shape[3] // 2)
        return rotate_and_attend(qkv, (still + 1, still), q.shape[2], self, focus, sinks=sinks)[None]

    @cached_property
    def layout(self) -> Layout:
        """The pieces in padded rows, for devices and numbers without a kernel for pieces end to end."""
        return lay(self)

    def listed(self, qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and keys and values of the list, of [N, heads + 2 · kv_heads, size]."""
        shared = (qkv.shape[1] - heads) // 2
        whole = len(self.places) == len(self.bounds) - 1
        kv = qkv[:, heads:] if whole else qkv[:, heads:].index_select(0, self.source)
        return qkv[:, :heads], kv[:, :shared], kv[:, shared:]


def pack(length: Tensor, segment: Tensor, row: Tensor) -> Packing:
    """The packing of pieces in the order they lie: of each row first its prefix (segment 0), then its suffixes."""
    begin = length.cumsum(0) - length
    first = torch.searchsorted(row, row)
    shared = torch.where(segment > 0, length[first], 0)
    kept = length > 0
    length, begin, shared, prefix_at = length[kept], begin[kept], shared[kept], begin[first][kept]
    seen = shared + length
    ends = seen.cumsum(0)

    # a key's token is its place in the list, less where its piece begins: at its prefix, and after that at its own
    before, own = (x.repeat_interleave(seen) for x in (prefix_at, begin - shared))
    inside = torch.arange(len(own)) - (ends - seen).repeat_interleave(seen)
    source = inside + torch.where(inside < shared.repeat_interleave(seen), before, own)
    zero = torch.zeros(1, dtype=torch.int32)
    counts = source.bincount(minlength=int(length.sum()))
    return Packing(
        queries=torch.cat([zero, length.cumsum(0).int()]),
        keys=torch.cat([zero, ends.int()]),
        prefixes=prefix_at.int(),
        longest=(int(length.max()), int(seen.max())),
        source=source,
        places=source.argsort(stable=True).int(),
        bounds=torch.cat([zero, counts.cumsum(0).int()]),
    )


class _Turn(torch.autograd.Function):
    """Rotary positions on the first `turning` heads of [N, heads, size], in place.

    Autograd is not told that they are in place, or it would copy what `qkv` is a view of: nobody has kept it.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, turning: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.turning, turned = turning, qkv.detach()
        host.turn(turned, turning, cos, sin)
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        host.turn(g, ctx.turning, cos, sin, -1.0)
        return g, None, None, None


class _Flash(torch.autograd.Function):
    """Rotation and attention of [N, heads + 2 · kv_heads, size] queries, keys and values, changed in place.

    By kernels of this library where these are quicker, or scores are capped (`kernels/attention.py`); by torch's where
    not: the operators behind `torch.nn.attention.varlen`, without its wrapper's tenth of a millisecond a call.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        packing: Packing,
        focus: Focus,
        interleaved: bool,
        sinks: Tensor | None,
    ) -> Tensor:
        from panoply.kernels.train import turn

        shared = (qkv.shape[1] - heads) // 2
        turning = qkv[:, : heads + shared]
        turn(turning, cos, sin, turning, interleaved=interleaved)
        ctx.packing, ctx.heads, ctx.shared, ctx.focus, ctx.interleaved = (
            packing,
            heads,
            shared,
            focus,
            interleaved,
        )
        out, lse, *state = attended(qkv, heads, packing, focus, sinks)
        ctx.save_for_backward(qkv, cos, sin, out, lse, sinks, *state[:2])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        from panoply.kernels.attention import backward, suits
        from panoply.kernels.train import gather, turn

        qkv, cos, sin, out, lse, sinks, *state = ctx.saved_tensors
        packing, heads, shared, focus = ctx.packing, ctx.heads, ctx.shared, ctx.focus
        slope, g = torch.empty_like(qkv), g.contiguous()
        if suits(qkv.shape[2], focus):
            d_k, d_v = backward(g, qkv, heads, out, lse, packing, focus, slope[:, :heads])
        else:
            slope[:, :heads], d_k, d_v = torch.ops.aten._flash_attention_backward(
                g,
                *packing.listed(qkv, heads),
                out,
                lse,
                packing.queries,
                packing.keys,
                *packing.longest,
                0.0,
                not focus.window,
                *state,
                **_options(focus),
            )
        gather(d_k, d_v, packing.places, packing.bounds, slope[:, heads:])
        turned = slope[:, : heads + shared]
        turn(turned, cos, sin, turned, -1.0, ctx.interleaved)
        on_sinks = None
        if sinks is not None:
            taken = (sinks.float()[:, None] - lse).exp()
            on_sinks = -(taken.t() * (g.float() * out).sum(-1)).sum(0).to(sinks.dtype)
        return slope, None, None, None, None, None, None, on_sinks


def attended(
    qkv: Tensor, heads: int, packing: Packing, focus: Focus, sinks: Tensor | None = None
) -> tuple[Tensor, ...]:
    """[N, heads, size] from rotated queries, keys and values, on a GPU in half precision.

    And [heads, N] logarithms of sums, and what torch's way back needs where torch's kernels were taken.
    """
    from panoply.kernels.attention import forward, suits

    state: list[Tensor] = []
    if suits(qkv.shape[2], focus):
        out, lse = forward(qkv, heads, packing, focus)
    else:
        out, lse, *state = torch.ops.aten._flash_attention_forward(
            *packing.listed(qkv, heads),
            packing.queries,
            packing.keys,
            *packing.longest,
            0.0,
            not focus.window,
            False,
            **_options(focus),
        )
    if sinks is not None:
        # One score more in every sum: weights shrink, and a backward pass given the larger sum computes just these.
        whole = torch.logaddexp(lse, sinks.float()[:, None])
        out.mul_((lse - whole).exp().t()[..., None])
        lse = whole
    return out, lse, *state


def _options(focus: Focus) -> dict[str, Any]:
    window = focus.window
    sides = {"window_size_left": window - 1 if window else -1, "window_size_right": 0 if window else -1}
    return {**sides, "scale": focus.scale}


def rotate_and_attend(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    heads: int,
    packing: Packing,
    focus: Focus,
    interleaved: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """[N, heads + 2 · kv_heads, size], which is overwritten with what was rotated, to [N, heads, size]."""
    if _has_kernel(qkv):
        found: Tensor = _Flash.apply(  # type: ignore[no-untyped-call]
            qkv, *rotation, heads, packing, focus, interleaved, sinks
        )
        return found
    turned = _Turn.apply(qkv, *rotation, (qkv.shape[1] + heads) // 2)  # type: ignore[no-untyped-call]
    return attend(turned, heads, packing.layout, focus, sinks)


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and has_triton()


# ------------------------------------------------------------------ pieces side by side, padded

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


def attend(qkv: Tensor, heads: int, layout: Layout, focus: Focus, sinks: Tensor | None = None) -> Tensor:
    """[N, heads + 2 · kv_heads, size] to [N, heads, size]."""
    laid: tuple[Tensor, ...] = _Lay.apply(qkv, heads, layout)  # type: ignore[no-untyped-call]
    mixed = []
    for i, bucket in enumerate(layout.buckets):
        q, k, v = (x.transpose(1, 2) for x in laid[3 * i : 3 * i + 3])
        mask = bucket.mask(focus.window, q.dtype)
        if focus.cap or sinks is not None:
            out = written_out(q, k, v, mask, focus.scale or q.shape[-1] ** -0.5, focus.cap, sinks)
        else:
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=focus.scale, enable_gqa=k.shape[1] < heads
            )
        mixed.append(out.transpose(1, 2))
    found: Tensor = _Unlay.apply(layout, *mixed)  # type: ignore[no-untyped-call]
    return found
