"""One readable decoder for the Llama, Qwen2, Qwen3 and Mistral layouts, with Hugging Face parameter names."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from panoply.errors import PanoplyError
from panoply.policies.attention import Visibility
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.fused import run_blocks
from panoply.policies.scoring import has_triton, wide_product

if TYPE_CHECKING:
    from panoply.policies.attention import Cache
    from panoply.policies.packing import Packing

__all__ = ["Decoder", "DecoderConfig"]


class Norm(nn.Module):
    """RMSNorm, computed in float32 whatever the weights are."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, index: int):
        super().__init__()
        width, size = config.width, config.head_dim
        self.index, self.head_dim, self.window = index, size, config.windows[index]
        self.q_proj = nn.Linear(width, config.heads * size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.kv_heads * size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.kv_heads * size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.heads * size, width, bias=config.out_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = Norm(size, config.norm_eps), Norm(size, config.norm_eps)
        self.qk_norm = config.qk_norm

    def project(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, T, heads, size] each."""
        rows, length, _ = x.shape
        q, k, v = (
            p(x).view(rows, length, -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rotation), rotate(k, rotation), v


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on [B, T, heads, size]; dimension i is paired with i + size / 2."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.width, config.inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.inner, config.width, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, config: DecoderConfig, index: int):
        super().__init__()
        self.input_layernorm = Norm(config.width, config.norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = Norm(config.width, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        sight: Visibility | Packing,
        cache: Cache | None,
    ) -> Tensor:
        q, k, v = self.self_attn.project(self.input_layernorm(x), rotation)
        if cache is not None:
            seen = cache.append(self.self_attn.index, k.transpose(1, 2), v.transpose(1, 2))
            k, v = seen[0].transpose(1, 2), seen[1].transpose(1, 2)
        x = x + self.self_attn.o_proj(sight.attend(q, k, v, self.self_attn.window).flatten(2))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Stack(nn.Module):
    """Embedding, blocks and final norm: what Hugging Face calls `model`."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = Norm(config.width, config.norm_eps)


class Decoder(nn.Module):
    """`hidden` then `logits`; apart, so that a caller pays for the vocabulary only where it asks."""

    softcap = 0.0
    """None of these layouts caps its logits; others do."""
    fusing = True
    """Whether what lies between matrix products is fused where rows are packed."""
    checkpointing = False
    """Whether a block's inside is computed again in the backward pass, for a third more work and little memory."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.model = Stack(config)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        # Not a buffer: `.to(bfloat16)` would round it, and positions would drift.
        self._frequencies, self._rope_factor = config.frequencies()
        self.tie()

    def tie(self) -> None:
        """Make head and embedding one parameter again, where the config says so."""
        if self.config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def head_weight(self) -> Tensor:
        if type(self.lm_head) is not nn.Linear:
            raise PanoplyError("An adapter on the head (lm_head) is not supported; leave it out.")
        return self.lm_head.weight

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    @property
    def packs(self) -> bool:
        """Whether rows are best packed: where there is an attention kernel for it, and on a CPU."""
        return self.device.type == "cpu" or self.dtype in (torch.bfloat16, torch.float16)

    @property
    def fuses(self) -> bool:
        """Whether packed rows go through fused blocks."""
        if self.device.type == "cpu":
            return self.fusing and self.dtype in (torch.float32, torch.float64)
        return self.fusing and self.packs and has_triton()

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """[B, T] tokens to [B, T, width] states after the final norm. See `Visibility` for who sees whom."""
        return self.hidden_states(tokens, positions, segments, cache)[0]

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        taps: Collection[int] = (),
        packing: Packing | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Also the states after `taps` blocks, as transformers counts: 0 the embedding, the last normed.

        A `packing` says who sees whom in one packed row.
        """
        if segments is not None and cache is not None:
            raise ValueError("segments and a cache cannot be combined")
        if bad := [k for k in taps if not 0 <= k <= self.config.layers]:
            raise PanoplyError(f"There is no hidden state {bad[0]} in {self.config.layers} layers.")
        x: Tensor = self.model.embed_tokens(tokens)
        rotation = self.rotation(positions, x.dtype)
        sight = packing or Visibility(positions, segments, cache is not None, x.dtype)
        if packing is not None and self.fuses:
            return run_blocks(self, x, rotation, packing, taps)
        tapped = {0: x} if 0 in taps else {}
        for depth, block in enumerate(self.model.layers, start=1):
            if self.checkpointing and torch.is_grad_enabled() and cache is None:
                x = checkpoint(block, x, rotation, sight, None, use_reentrant=False)
            else:
                x = block(x, rotation, sight, cache)
            if depth in taps:
                tapped[depth] = x
        x = self.model.norm(x)
        if self.config.layers in taps:
            tapped[self.config.layers] = x
        return x, tapped

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    def normed(self, state: Tensor) -> Tensor:
        """The final norm, which the output weights expect, on a state from between blocks."""
        out: Tensor = self.model.norm(state)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """The product is taken in the weights' dtype and given in float32."""
        if hidden.is_cuda and not torch.is_grad_enabled():
            return wide_product(hidden.flatten(0, -2), self.head_weight.t()).view(*hidden.shape[:-1], -1)
        product = F.linear(hidden, self.head_weight)
        return product.to(torch.promote_types(product.dtype, torch.float32))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits of whole sequences; for looking, and for libraries that call a model."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.logits(self.hidden(tokens, positions))

    def new_cache(self, rows: int, capacity: int) -> Cache:
        from panoply.policies.attention import Cache

        c = self.config
        return Cache(c.layers, rows, c.kv_heads, capacity, c.head_dim, self.dtype, self.device)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fresh weights that depend on the seed only. Outputs into the residual stream start smaller."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            deviation = 0.02 if "embed" in name or "lm_head" in name else weight.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                deviation /= (2 * self.config.layers) ** 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)

    def prepare_inputs_for_generation(self, *_: Any, **__: Any) -> dict[str, Any]:
        """A name PEFT looks for when it loads an adapter of a causal language model."""
        raise PanoplyError("Sample with panoply.rollout, not with generate().")

    def rotation_table(self, positions: int) -> Tensor:
        """[positions, head_dim]: each position's cosines, then its sines."""
        cos, sin = self.rotation(torch.arange(positions, device=self.device)[None], self.dtype)
        return torch.cat([cos, sin], dim=-1)[0, :, 0].contiguous()

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of [B, T] positions, [B, T, 1, head_dim / 2] each."""
        self._frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None].float() * self._frequencies
        cos, sin = angles.cos() * self._rope_factor, angles.sin() * self._rope_factor
        return cos[:, :, None].to(dtype), sin[:, :, None].to(dtype)
