"""One readable decoder for the layouts of `policies/architectures.py`, with Hugging Face parameter names."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from panoply.errors import PanoplyError
from panoply.policies.attention import HEAD_SIZE, Focus, Newest, Visibility
from panoply.policies.config_reading import ACTIVATE
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.experts import Mixture
from panoply.policies.fused import run_blocks
from panoply.policies.rotary import wider
from panoply.policies.scoring import has_triton, wide_product

if TYPE_CHECKING:
    from panoply.policies.attention import Cache
    from panoply.policies.packing import Packing
    from panoply.policies.thoughts import Inputs, Thoughts

__all__ = ["Decoder", "DecoderConfig"]


class Norm(nn.Module):
    """RMSNorm, computed in float32 whatever the weights are; some layouts keep what is to be added to 1 as weight."""

    def __init__(self, size: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.full((size,), 1.0 - offset)), eps, offset

    def forward(self, x: Tensor) -> Tensor:
        if not self.offset:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide) + self.offset, self.eps)
        return normed.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, index: int):
        super().__init__()
        width, size, layout = config.width, config.head_dim, config.layout
        self.index, self.head_dim, self.heads, self.kv_heads = index, size, config.heads, config.kv_heads
        self.table, self.interleaved = config.rotary[index], layout.interleaved
        scale = None if config.score_scale == size**-0.5 else config.score_scale
        self.focus = Focus(config.windows[index], scale, config.attention_cap)
        outputs = [config.heads * size, config.kv_heads * size, config.kv_heads * size]
        if len(layout.qkv) == 1:
            outputs = [sum(outputs)]
        for name, wide in zip(layout.qkv, outputs, strict=True):
            setattr(self, name, nn.Linear(width, wide, bias=config.qkv_bias))
        self.o_proj = nn.Linear(config.heads * size, width, bias=config.out_bias)
        self.qk_norm, self._inputs = layout.qk_norm, layout.qkv
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if layout.sinks else None
        if layout.qk_norm:
            whole = layout.qk_norm == "whole"
            norm = partial(Norm, eps=config.norm_eps, offset=layout.norm_offset)
            self.q_norm = norm(config.heads * size if whole else size)
            self.k_norm = norm(config.kv_heads * size if whole else size)

    @property
    def inputs(self) -> list[nn.Linear]:
        """The layers whose outputs, side by side, are queries, keys and values."""
        return [getattr(self, name) for name in self._inputs]

    def project(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, T, heads, size] each."""
        rows, length, _ = x.shape
        products = [layer(x) for layer in self.inputs]
        if len(products) == 1:
            spans = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
            products = list(torch.split(products[0], spans, dim=-1))
        if self.qk_norm == "whole":
            products[0], products[1] = self.q_norm(products[0]), self.k_norm(products[1])
        q, k, v = (p.view(rows, length, -1, self.head_dim) for p in products)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rotation, self.interleaved), rotate(k, rotation, self.interleaved), v


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor], interleaved: bool = False) -> Tensor:
    """Rotary positions on the first dimensions of [B, T, heads, size], as many as the rotation is for.

    Dimension i is paired with i + half of them, or 2i with 2i + 1 where they are interleaved.
    """
    cos, sin = rotation
    turning = 2 * cos.shape[-1]
    x, still = x[..., :turning], x[..., turning:]
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    pair = [first * cos - second * sin, second * cos + first * sin]
    if interleaved:
        pair = [torch.stack(pair, dim=-1).flatten(-2)]
    return torch.cat([*pair, still] if still.shape[-1] else pair, dim=-1)


class FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        names = config.layout.gate_up
        for name in names:
            wide = config.inner if len(names) == 2 else 2 * config.inner
            setattr(self, name, nn.Linear(config.width, wide, bias=config.gate_bias))
        self.down_proj = nn.Linear(config.inner, config.width, bias=config.gate_bias)
        self.activation, self._inputs = config.activation, names

    @property
    def inputs(self) -> list[nn.Linear]:
        """The layers whose outputs, side by side, are gates and what they multiply."""
        return [getattr(self, name) for name in self._inputs]

    def forward(self, x: Tensor) -> Tensor:
        products = [layer(x) for layer in self.inputs]
        gate, up = products if len(products) == 2 else products[0].chunk(2, dim=-1)
        out: Tensor = self.down_proj(ACTIVATE[self.activation](gate) * up)
        return out


class Block(nn.Module):
    mlp: Any

    def __init__(self, config: DecoderConfig, index: int):
        super().__init__()
        names, self.residual_scale = config.layout.norms, config.residual_scale

        def norm(name: str) -> Norm | None:
            if name:
                setattr(self, name, Norm(config.width, config.norm_eps, config.layout.norm_offset))
            return getattr(self, name) if name else None

        before = norm(names.before_attention)
        self.self_attn = Attention(config, index)
        after, before_mlp = norm(names.after_attention), norm(names.before_mlp)
        mixing = None if index in config.dense else config.mixing
        self.mlp = FeedForward(config) if mixing is None else Mixture(config.width, mixing)
        self.norms: tuple[Norm | None, ...] = (before, after, before_mlp, norm(names.after_mlp))
        """Before and after attention, before and after the feed-forward layer; under their names they are modules."""

    def forward(
        self,
        x: Tensor,
        rotations: list[tuple[Tensor, Tensor]],
        sight: Visibility | Packing,
        cache: Cache | Newest | None,
    ) -> Tensor:
        attention = self.self_attn
        before, after, before_mlp, after_mlp = self.norms
        q, k, v = attention.project(_normed(before, x), rotations[attention.table])
        how = (attention.focus, attention.sinks)
        if isinstance(cache, Newest):
            found = cache.attend(attention.index, q, k, v, *how)
        else:
            if cache is not None:
                seen = cache.append(attention.index, k.transpose(1, 2), v.transpose(1, 2))
                k, v = seen[0].transpose(1, 2), seen[1].transpose(1, 2)
            found = sight.attend(q, k, v, *how)
        mixed = attention.o_proj(found.flatten(2))
        x = self._add(x, _normed(after, mixed))
        return self._add(x, _normed(after_mlp, self.mlp(_normed(before_mlp, x))))

    def _add(self, x: Tensor, change: Tensor) -> Tensor:
        return x + change if self.residual_scale == 1.0 else x + change * self.residual_scale


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    out: Tensor = x if norm is None else norm(x)
    return out


class Embedding(nn.Embedding):
    """One that draws no weights on no device, for which torch would load its compiler (`loops/compiler.py`)."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Stack(nn.Module):
    """Embedding, blocks and final norm: what Hugging Face calls `model`."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = Norm(config.width, config.norm_eps, config.layout.norm_offset)


class Decoder(nn.Module):
    """`hidden` then `logits`; apart, so that a caller pays for the vocabulary only where it asks."""

    fusing = True
    """Whether what lies between matrix products is fused where rows are packed."""
    checkpointing = False
    """Whether a block's inside is computed again in the backward pass, for a third more work and little memory."""
    thoughts: Thoughts | None
    """What it feeds back to itself while it decodes, where it does (`policies/thoughts.py`)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config, self.thoughts = config, None
        self.model = Stack(config)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        # Not a buffer: `.to(bfloat16)` would round it, and positions would drift.
        self._frequencies = config.frequencies()
        self.softcap, self._plain = config.logit_cap, config.plain
        self._embedding_scale = config.width**0.5 if config.layout.root_embedding else config.embedding_scale
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
    def glances(self) -> bool:
        """Whether a kernel can attend where one new token a row is decoded."""
        return self.config.head_dim <= HEAD_SIZE and has_triton()

    @property
    def fuses(self) -> bool:
        """Whether packed rows go through fused blocks."""
        if self.device.type == "cpu":
            return self.fusing and self._plain and self.dtype in (torch.float32, torch.float64)
        return self.fusing and self.packs and has_triton()

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None = None,
        cache: Cache | Newest | None = None,
        inputs: Inputs | None = None,
    ) -> Tensor:
        """[B, T] tokens to [B, T, width] states after the final norm. See `Visibility` for who sees whom."""
        return self.hidden_states(tokens, positions, segments, cache, inputs=inputs)[0]

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None = None,
        cache: Cache | Newest | None = None,
        taps: Collection[int] = (),
        packing: Packing | None = None,
        inputs: Inputs | None = None,
        sight: Visibility | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Also the states after `taps` blocks, as transformers counts: 0 the embedding, the last normed.

        A `packing` says who sees whom in one packed row, a `sight` in padded ones where that is not as usual; `inputs`
        where vectors are read.
        """
        if segments is not None and cache is not None:
            raise ValueError("segments and a cache cannot be combined")
        if bad := [k for k in taps if not 0 <= k <= self.config.layers]:
            raise PanoplyError(f"There is no hidden state {bad[0]} in {self.config.layers} layers.")
        x = self.embed(tokens, inputs)
        rotations = self.rotations(positions, x.dtype)
        seen = packing or sight or Visibility(positions, segments, cache is not None, x.dtype)
        if packing is not None and self.fuses:
            return run_blocks(self, x, rotations, packing, taps)
        tapped = {0: x} if 0 in taps else {}
        for depth, block in enumerate(self.model.layers, start=1):
            if self.checkpointing and torch.is_grad_enabled() and cache is None:
                x = checkpoint(block, x, rotations, seen, None, use_reentrant=False)
            else:
                x = block(x, rotations, seen, cache)
            if depth in taps:
                tapped[depth] = x
        x = self.normed(x)
        if self.config.layers in taps:
            tapped[self.config.layers] = x
        return x, tapped

    def embed(self, tokens: Tensor, inputs: Inputs | None = None) -> Tensor:
        """What the first block reads. A layout's factor is rounded to the weights' dtype, as Gemma's is.

        Where `inputs` has vectors, those; or what the model's thoughts make of them and the embedding.
        """
        x: Tensor = self.model.embed_tokens(tokens)
        factor = self.embedding_factor
        x = x if factor == 1.0 else x * factor
        if inputs is None:
            return x
        flat = x.flatten(0, -2)
        vectors = inputs.vectors.to(x.dtype)
        if self.thoughts is not None:
            vectors = self.thoughts.read(flat[inputs.at], vectors)
        return flat.index_copy(0, inputs.at, vectors).view_as(x)

    @property
    def embedding_factor(self) -> float:
        exact = self._embedding_scale
        return exact if exact == 1.0 else float(torch.tensor(exact, dtype=self.dtype, device="cpu"))

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    def normed(self, state: Tensor) -> Tensor:
        """The final norm, which the output weights expect, on a state from between blocks.

        Where a layout divides its logits, states are divided here, so that logits are their product with the weights.
        """
        out: Tensor = self.model.norm(state)
        return self.divided(out)

    def divided(self, state: Tensor) -> Tensor:
        return state if self.config.logit_divisor == 1.0 else state / self.config.logit_divisor

    def logits(self, hidden: Tensor) -> Tensor:
        """The product is taken in the weights' dtype and given in float32."""
        if hidden.is_cuda and not torch.is_grad_enabled():
            z = wide_product(hidden.flatten(0, -2), self.head_weight.t()).view(*hidden.shape[:-1], -1)
        else:
            z = F.linear(hidden, self.head_weight)
            z = z.to(torch.promote_types(z.dtype, torch.float32))
        return torch.tanh(z / self.softcap) * self.softcap if self.softcap else z

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits of whole sequences; for looking, and for libraries that call a model."""
        if tokens.shape[1] > self.config.max_positions and wider(self.config):
            raise PanoplyError(
                f"A sequence of {tokens.shape[1]} tokens is longer than the model's context of "
                f"{self.config.max_positions}.{wider(self.config)}"
            )
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
            if weight.ndim == 1 or name.endswith("_bias"):
                weight.fill_(1.0 - self.config.layout.norm_offset if name.endswith("norm.weight") else 0.0)
                continue
            deviation = 0.02 if "embed" in name or "lm_head" in name else weight.shape[-1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                deviation /= (2 * self.config.layers) ** 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)

    def prepare_inputs_for_generation(self, *_: Any, **__: Any) -> dict[str, Any]:
        """A name PEFT looks for when it loads an adapter of a causal language model."""
        raise PanoplyError("Sample with panoply.rollout, not with generate().")

    def rotation_tables(self, positions: int) -> list[Tensor]:
        """[positions, rotary_dim] for each way in which layers turn: a position's cosines, then its sines."""
        all_of_them = torch.arange(positions, device=self.device)[None]
        pairs = self.rotations(all_of_them, self.dtype)
        return [torch.cat(pair, dim=-1)[0, :, 0].contiguous() for pair in pairs]

    def rotations(self, positions: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines of [B, T] positions, [B, T, 1, rotary_dim / 2] each, for each way in which layers turn."""
        self._frequencies = [(f.to(positions.device), factor) for f, factor in self._frequencies]
        found = []
        for frequencies, factor in self._frequencies:
            angles = positions[..., None].float() * frequencies
            cos, sin = angles.cos() * factor, angles.sin() * factor
            found.append((cos[:, :, None].to(dtype), sin[:, :, None].to(dtype)))
        return found
