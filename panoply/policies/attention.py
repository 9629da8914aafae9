"""Who sees whom in padded rows and in a cache, the attention that follows from it, and maps of it to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged

if TYPE_CHECKING:
    from panoply.policies.decoder import Block, Decoder
    from panoply.policies.text import TextPolicy


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


@torch.no_grad()
def maps(policy: TextPolicy, experience: Experience, block: int, head: int | None = None) -> Ragged:
    """A row a decision: the weights, summing to 1, with which it attends to each token before it in block 1, 2, …

    Of one head, or the mean over heads. One context at a time and without kernels: for looking, and for small inputs.
    """
    model: Any = policy.model
    blocks, config = getattr(model, "blocks", None), model.config
    if blocks is None:
        raise PanoplyError("Attention maps need a Llama, Qwen2, Qwen3 or Mistral layout.")
    if not 1 <= block <= config.layers or not 0 <= (head or 0) < config.heads:
        raise PanoplyError(
            f"There is no attention of block {block}" + ("" if head is None else f", head {head},")
            + f" in {config.layers} blocks of {config.heads} heads, which are counted from 1 and from 0."
        )  # fmt: skip
    tokens, at = experience.context.ragged("tokens"), experience["position"]
    rows: list[Tensor] = [torch.zeros(0)] * len(experience)
    for context in sorted(set(experience["context"].tolist())):
        here = (experience["context"] == context).nonzero().flatten()
        seen = tokens[context][: int(at[here].max())][None].to(policy.device)
        weights = _weights(model, blocks[block - 1], seen, block)
        weights = weights.mean(0) if head is None else weights[head]
        for row in here.tolist():
            rows[row] = weights[int(at[row]) - 1, : int(at[row])].cpu()
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Ragged(torch.cat([torch.zeros(0), *rows]), offsets)


def _weights(model: Decoder, block: Block, tokens: Tensor, depth: int) -> Tensor:
    """[heads, length, length] attention of one row of tokens."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    _, tapped = model.hidden_states(tokens, positions, taps=(depth - 1,))
    x = tapped[depth - 1]
    attend = block.self_attn
    q, k, _ = attend.project(block.input_layernorm(x), model.rotation(positions, x.dtype))
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bqhs,bkhs->bhqk", q.float(), k.float()) * attend.head_dim**-0.5
    sight = Visibility(positions, None, False, torch.float32)
    weights: Tensor = (scores + sight.build(attend.window, tokens.shape[1])).softmax(-1)
    return weights[0]
