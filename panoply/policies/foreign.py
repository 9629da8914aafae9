"""Any other architecture, run by transformers, behind the decoder's interface."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from panoply.errors import PanoplyError, needs_extra
from panoply.policies.attention import Visibility
from panoply.policies.scoring import wide_product

if TYPE_CHECKING:
    from panoply.policies.cache import Cache

KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class ForeignConfig:
    """What the rest of the library asks of a model, read from transformers' own config."""

    model_type: str
    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    window: int
    kinds: tuple[str, ...]
    """Attention kinds of the layers where they differ; empty where one mask serves all."""

    @classmethod
    def of(cls, config: Any) -> ForeignConfig:
        if not getattr(config, "num_attention_heads", None):
            raise PanoplyError(
                f"The architecture '{config.model_type}' has no attention heads to mask or cache."
            )
        heads, width = int(config.num_attention_heads), int(config.hidden_size)
        kinds = tuple(dict.fromkeys(getattr(config, "layer_types", None) or ()))
        if unknown := [k for k in kinds if k not in KINDS]:
            raise PanoplyError(
                f"'{config.model_type}' has layers of kind {unknown[0]}, which is not supported."
            )
        return cls(
            model_type=str(config.model_type),
            vocab_size=int(config.vocab_size),
            width=width,
            layers=int(config.num_hidden_layers),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or width // heads),
            max_positions=int(getattr(config, "max_position_embeddings", None) or 2048),
            window=int(getattr(config, "sliding_window", None) or 0),
            kinds=kinds if "sliding_attention" in kinds else (),
        )


class CacheAdapter:
    """Stands where transformers expects its own cache, and writes into ours."""

    is_compileable = False

    def __init__(self, cache: Cache):
        self.cache = cache

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self.cache.append(layer_idx, k, v)

    def get_seq_length(self, *_: Any) -> int:
        """Unused where positions and masks are given."""
        return 0


class Foreign(nn.Module):
    """A causal language model of transformers. On construction a short probe checks that it can be trusted:

    that its logits are its head times its last state, that the masks given are obeyed (recurrent layers do
    not) and that its keys and values can be cached.
    """

    def __init__(self, inner: Any):
        super().__init__()
        self.inner = inner
        self.config = ForeignConfig.of(inner.config)
        self.softcap = float(getattr(inner.config, "final_logit_softcapping", None) or 0.0)
        self._probe()

    @property
    def head_weight(self) -> Tensor:
        weight: Tensor = self.inner.get_output_embeddings().weight
        return weight

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    def hidden(
        self, tokens: Tensor, positions: Tensor, segments: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        return self.hidden_states(tokens, positions, segments, cache)[0]

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None = None,
        cache: Cache | None = None,
        taps: Collection[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if segments is not None and cache is not None:
            raise ValueError("segments and a cache cannot be combined")
        if bad := [k for k in taps if not 0 <= k <= self.config.layers]:
            raise PanoplyError(f"There is no hidden state {bad[0]} in {self.config.layers} layers.")
        slots = tokens.shape[1] if cache is None else self._visible_slots(cache, tokens)
        sight = Visibility(positions, segments, cache is not None, self.dtype)
        out = self.inner.base_model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self._masks(sight, slots),
            past_key_values=None if cache is None else CacheAdapter(cache),
            use_cache=cache is not None,
            output_hidden_states=bool(taps),
        )
        hidden: Tensor = out.last_hidden_state
        return hidden, {k: out.hidden_states[k] for k in taps}

    def logits(self, hidden: Tensor) -> Tensor:
        flat = wide_product(hidden.reshape(-1, hidden.shape[-1]), self.head_weight.t())
        z = flat.view(*hidden.shape[:-1], -1)
        return torch.tanh(z / self.softcap) * self.softcap if self.softcap else z

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.logits(self.hidden(tokens, positions))

    def new_cache(self, rows: int, capacity: int) -> Cache:
        from panoply.policies.cache import Cache

        c = self.config
        return Cache(c.layers, rows, c.kv_heads, capacity, c.head_dim, self.dtype, self.device)

    def write(self, folder: Path, shard_bytes: int) -> None:
        self.inner.save_pretrained(folder, max_shard_size=shard_bytes)

    def _visible_slots(self, cache: Cache, tokens: Tensor) -> int:
        """How many keys the cache will show, told by a write that the first layer's own write replaces."""
        shape = (tokens.shape[0], self.config.kv_heads, tokens.shape[1], self.config.head_dim)
        blank = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return cache.append(0, blank, blank)[0].shape[2]

    def _masks(self, sight: Visibility, slots: int) -> Tensor | dict[str, Tensor] | None:
        """Additive masks of four dimensions, which transformers takes as they are; one a kind of layer."""
        if sight.causal:
            return None
        window = self.config.window
        if not self.config.kinds:
            return sight.build(window if window < slots else 0, slots)
        windows = {"full_attention": 0, "sliding_attention": window if window < slots else 0}
        return {kind: sight.build(windows[kind], slots) for kind in self.config.kinds}

    @torch.no_grad()
    def _probe(self) -> None:
        name = self.config.model_type
        refusal = f"The architecture '{name}' cannot be used"
        was_training = self.training
        self.eval()
        length = 12
        tokens = torch.arange(length, device=self.device)[None] * 7 % self.config.vocab_size
        try:
            plain = self.inner(input_ids=tokens, use_cache=False).logits.float()
            ours = self(tokens)
            shared = self._probe_shared(tokens)
            cached = self._probe_cached(tokens)
        except PanoplyError:
            raise
        except Exception as problem:
            first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
            raise PanoplyError(f"{refusal}: {first}.") from problem
        finally:
            self.train(was_training)
        tolerance = (1e-3 if self.dtype == torch.float32 else 5e-2) * (1 + plain.abs().max())
        checks = {
            "its logits are not its head times its last hidden state": ours,
            "it does not obey an attention mask, so prompts cannot be shared": shared,
            "its keys and values cannot be kept in a cache": cached,
        }
        for reason, logits in checks.items():
            if logits.shape != plain.shape or not bool(((logits - plain).abs() <= tolerance).all()):
                raise PanoplyError(f"{refusal}: {reason}.")

    def _probe_shared(self, tokens: Tensor) -> Tensor:
        """The tokens' logits with their second half behind a stranger's suffix of the same prefix."""
        half = tokens.shape[1] // 2
        row = torch.cat([tokens[:, :half], tokens[:, :half].flip(1), tokens[:, half:]], dim=1)
        here = torch.arange(half, device=tokens.device)
        positions = torch.cat([here, here + half, here + half])[None]
        segments = torch.arange(3, device=tokens.device).repeat_interleave(half)[None]
        logits = self.logits(self.hidden(row, positions, segments))
        return torch.cat([logits[:, :half], logits[:, 2 * half :]], dim=1)

    def _probe_cached(self, tokens: Tensor) -> Tensor:
        cache = self.new_cache(1, tokens.shape[1])
        parts = []
        for part in torch.split(torch.arange(tokens.shape[1], device=tokens.device)[None], [5, 6, 1], dim=1):
            cache.begin(part)
            parts.append(self.logits(self.hidden(tokens.gather(1, part), part, cache=cache)))
        return torch.cat(parts, dim=1)


def load_foreign(folder: Path, dtype: torch.dtype, device: torch.device | str) -> Foreign:
    """Remote code is never run and pickled weights never opened."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise needs_extra("transformers", "hf", f"The architecture in {folder}") from None
    try:
        config = AutoConfig.from_pretrained(folder)
        # Soft-capped attention scores exist only in the eager kernel.
        kernel = "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"
        inner: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, attn_implementation=kernel
        )
    except Exception as problem:
        first = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        raise PanoplyError(f"transformers cannot open {folder}: {first}.") from problem
    return Foreign(inner.to(device).eval())
