"""Who sees whom in padded rows and in a cache, and the attention that follows from it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Visibility:
    """Which keys a query sees, as additive masks, each built once per forward pass for all layers.

    Without segments a query sees the keys of earlier positions. Segment 0 is a prefix that all see, s > 0 a
    suffix that only itself sees, -1 padding, which sees padding. With a cache, slot j holds position j.
    """

    def __init__(self, positions: Tensor, segments: Tensor | None, cached: bool, dtype: torch.dtype):
        self.positions, self.segments, self.cached, self.dtype = positions, segments, cached, dtype
        here = torch.arange(positions.shape[1], device=positions.device)
        self.causal = not cached and segments is None and bool((positions == here).all())
        self._masks: dict[tuple[int, int], Tensor | None] = {}

    def mask(self, window: int, keys: int) -> Tensor | None:
        """[B, 1, T, keys]; None where plain causal attention is the same."""
        window = 0 if window >= keys else window
        if (window, keys) not in self._masks:
            plain = self.causal and not window
            self._masks[window, keys] = None if plain else self.build(window, keys)
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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """[B, T, heads, size] queries and [B, keys, kv_heads, size] keys and values to [B, T, heads, size]."""
        mask = self.mask(window, k.shape[1])
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention, causal without a mask. Query heads may share key heads; how to say so decides the speed."""
    rows, heads, length, size = q.shape
    share = heads // k.shape[1]
    if length == 1 and mask is not None and q.device.type == "cpu":
        # One query a row is no work for an attention kernel: two products and what is between them are faster.
        folded = q.reshape(-1, share, size)
        flat = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        k, v = flat
        scores = torch.bmm(folded * size**-0.5, k.transpose(1, 2)).view(rows, -1, k.shape[1])
        weights = scores.add_(mask[:, 0]).softmax(-1).view(len(k), share, -1)
        return torch.bmm(weights, v).view(rows, heads, 1, size)
    if share > 1 and length == 1 and mask is not None:
        # One query a row: the heads that share keys are so many queries of one head.
        folded = F.scaled_dot_product_attention(q.view(rows, -1, share, size), k, v, attn_mask=mask)
        return folded.reshape(rows, heads, 1, size)
    if share > 1 and q.is_cuda:
        # With `enable_gqa` CUDA falls back to kernels that are three times slower under a mask.
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    grouped = k.shape[1] < heads
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
