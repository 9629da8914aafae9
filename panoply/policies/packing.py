"""Packed rows: all sequences end to end without padding, attended with torch's variable-length kernel where it is.

A suffix's keys are its prefix's and its own: keys and values, a small part of the work, are copied to each suffix, and
everything else of a prefix is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from panoply.experience import moved
from panoply.kernels import host
from panoply.policies.padded import Layout, attend, lay


@dataclass(frozen=True)
class Packing:
    """Pieces of a packed row of N tokens: piece i has queries `queries[i] : queries[i + 1]` of the row, and keys
    `keys[i] : keys[i + 1]` of a list of K, causal from its end.
    """

    queries: Tensor
    keys: Tensor
    longest: tuple[int, int]
    """The most queries and the most keys of a piece."""
    source: Tensor
    """[K] the token each key is of."""
    own: Tensor
    """[N] where in the list a token stands in its own piece."""
    copies: Tensor
    """Where in the list the copies of prefix tokens stand, and (`copied`) of which prefix token each is."""
    copied: Tensor
    prefix: Tensor
    """The prefix tokens that `copied` numbers."""

    def to(self, device: torch.device | str) -> Packing:
        there = {
            f.name: moved(v, device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        return Packing(longest=self.longest, **there)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """[1, N, heads, size] queries and [1, N, kv_heads, size] keys and values to [1, N, heads, size]."""
        qkv = torch.cat([q[0], k[0], v[0]], dim=1)
        if not _has_kernel(q):
            return attend(qkv, q.shape[2], self.layout, window)[None]
        still = q.new_zeros(q.shape[1], q.shape[3] // 2)
        return rotate_and_attend(qkv, (still + 1, still), q.shape[2], self, window)[None]

    @cached_property
    def layout(self) -> Layout:
        """The pieces in padded rows, for devices and numbers without a kernel for pieces end to end."""
        return lay(self)

    def spread(self, x: Tensor) -> Tensor:
        """[N, …] tokens to the list of keys."""
        return x.index_select(0, self.source) if len(self.copies) else x

    def gather(self, g: Tensor) -> Tensor:
        """The gradient of `spread`: a prefix's is summed in float32, however many suffixes there are."""
        if not len(self.copies):
            return g
        out = g.index_select(0, self.own)
        wide = torch.promote_types(g.dtype, torch.float32)
        total = torch.zeros(len(self.prefix), *g.shape[1:], dtype=wide, device=g.device)
        total.index_add_(0, self.copied, g.index_select(0, self.copies).to(wide))
        total += out.index_select(0, self.prefix)
        return out.index_copy_(0, self.prefix, total.to(g.dtype))


def pack(length: Tensor, segment: Tensor, row: Tensor) -> Packing:
    """The packing of pieces in the order they lie: of each row first its prefix (segment 0), then its suffixes."""
    begin = length.cumsum(0) - length
    first = torch.searchsorted(row, row)
    shared = torch.where(segment > 0, length[first], 0)
    kept = length > 0
    length, begin, shared, prefix_at = length[kept], begin[kept], shared[kept], begin[first][kept]
    seen = shared + length
    ends = seen.cumsum(0)

    piece = torch.arange(len(seen)).repeat_interleave(seen)  # of each key
    inside = torch.arange(len(piece)) - (ends - seen)[piece]
    copy = inside < shared[piece]
    source = inside + torch.where(copy, prefix_at[piece], (begin - shared)[piece])
    own = (~copy).nonzero().flatten()
    copies = copy.nonzero().flatten()
    prefix, copied = torch.unique(source[copies], return_inverse=True)
    zero = torch.zeros(1, dtype=torch.int32)
    return Packing(
        queries=torch.cat([zero, length.cumsum(0).int()]),
        keys=torch.cat([zero, ends.int()]),
        longest=(int(length.max()), int(seen.max())),
        source=source,
        own=own,
        copies=copies,
        copied=copied,
        prefix=prefix,
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

    The operators are those behind `torch.nn.attention.varlen`, without its wrapper's tenth of a millisecond a call.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, packing: Packing, window: int
    ) -> Tensor:
        from panoply.kernels.train import turn

        shared = (qkv.shape[1] - heads) // 2
        turning = qkv[:, : heads + shared]
        turn(turning, cos, sin, turning)
        ctx.packing, ctx.heads, ctx.shared, ctx.causal = packing, heads, shared, not window
        ctx.spans = (packing.queries, packing.keys, *packing.longest)
        ctx.options = {
            "window_size_left": window - 1 if window else -1,
            "window_size_right": 0 if window else -1,
        }
        kv = packing.spread(qkv[:, heads:])
        out: Tensor
        out, lse, *state = torch.ops.aten._flash_attention_forward(
            qkv[:, :heads], kv[:, :shared], kv[:, shared:], *ctx.spans, 0.0, ctx.causal, False, **ctx.options
        )
        ctx.save_for_backward(qkv, cos, sin, out, lse, *state[:2])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        from panoply.kernels.train import turn

        qkv, cos, sin, out, lse, *state = ctx.saved_tensors
        packing, heads, shared = ctx.packing, ctx.heads, ctx.shared
        kv = packing.spread(qkv[:, heads:])
        d_q, d_k, d_v = torch.ops.aten._flash_attention_backward(
            g.contiguous(), qkv[:, :heads], kv[:, :shared], kv[:, shared:], out, lse, *ctx.spans, 0.0, ctx.causal,
            *state, **ctx.options,
        )  # fmt: skip
        slope = torch.empty_like(qkv)
        kept = packing.gather(torch.cat([d_k, d_v], dim=1))
        turn(d_q, cos, sin, slope[:, :heads], -1.0)
        turn(kept[:, :shared], cos, sin, slope[:, heads : heads + shared], -1.0)
        slope[:, heads + shared :] = kept[:, shared:]
        return slope, None, None, None, None, None


def rotate_and_attend(
    qkv: Tensor, rotation: tuple[Tensor, Tensor], heads: int, packing: Packing, window: int
) -> Tensor:
    """[N, heads + 2 · kv_heads, size], which is overwritten with what was rotated, to [N, heads, size]."""
    if _has_kernel(qkv):
        found: Tensor = _Flash.apply(qkv, *rotation, heads, packing, window)  # type: ignore[no-untyped-call]
        return found
    turned = _Turn.apply(qkv, *rotation, (qkv.shape[1] + heads) // 2)  # type: ignore[no-untyped-call]
    return attend(turned, heads, packing.layout, window)


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
