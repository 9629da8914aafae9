"""Any other architecture, run by transformers, behind the decoder's interface."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from panoply.errors import PanoplyError, first_line
from panoply.files import is_number
from panoply.policies.attention import HEAD_SIZE, Newest, Visibility
from panoply.policies.foreign_attention import Look, NewestToken, PackedRow, Routed, looking, take_over
from panoply.policies.foreign_folder import quiet_transformers
from panoply.policies.rotary import reach
from panoply.policies.scoring import has_triton, wide_product

if TYPE_CHECKING:
    from pathlib import Path

    from panoply.policies.attention import Cache
    from panoply.policies.packing import Packing

Masks = Tensor | dict[str, Tensor] | None
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
    windows: tuple[int, ...]
    """How many positions each layer sees; 0: all."""
    kinds: tuple[str, ...]
    """The layers' kinds of attention where transformers wants a mask for each; empty where one mask serves all."""

    @classmethod
    def of(cls, config: Any, context: int = 0) -> ForeignConfig:
        if not getattr(config, "num_attention_heads", None):
            raise PanoplyError(
                f"The architecture '{config.model_type}' has no attention heads to mask or cache."
            )
        if getattr(config, "kv_lora_rank", None):
            raise PanoplyError(
                f"'{config.model_type}' has keys and values of different sizes (multi-head latent attention, "
                "kv_lora_rank), which is not supported."
            )
        heads, width = int(config.num_attention_heads), int(config.hidden_size)
        layers, kinds = int(config.num_hidden_layers), tuple(getattr(config, "layer_types", None) or ())
        if unknown := [k for k in kinds if k not in KINDS]:
            raise PanoplyError(
                f"'{config.model_type}' has layers of kind {unknown[0]}, which is not supported."
            )
        window = int(getattr(config, "sliding_window", None) or 0)
        slides = [kind == "sliding_attention" for kind in kinds] or [True] * layers
        return cls(
            model_type=str(config.model_type),
            vocab_size=int(config.vocab_size),
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or width // heads),
            max_positions=_positions(config, context),
            windows=tuple(window if far else 0 for far in slides),
            kinds=kinds if "sliding_attention" in kinds else (),
        )


class CacheAdapter:
    """Stands where transformers expects its own cache, and writes into ours; attention itself writes a `Newest`."""

    is_compileable = False

    def __init__(self, cache: Cache | Newest, watched: Routed | None = None):
        self.cache, self.watched = cache, watched

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        seen = (k, v) if isinstance(self.cache, Newest) else self.cache.append(layer_idx, k, v)
        if self.watched is not None:
            self.watched.given[layer_idx] = seen
        return seen

    def get_seq_length(self, *_: Any) -> int:
        """Unused where positions and masks are given."""
        return 0


class Foreign(nn.Module):
    """A causal language model of transformers. On construction a short probe checks that it can be trusted:

    that its logits are its head times its last state, that the masks given are obeyed (recurrent layers do
    not) and that its keys and values can be cached. It also finds out whether all layers let attention be replaced.
    """

    replaced = False
    """Whether they do (`foreign_attention.py`)."""

    def __init__(self, inner: Any, context: int = 0):
        super().__init__()
        self.inner = inner
        self.config = self._sizes(inner.config, context)
        self.softcap = float(getattr(inner.config, "final_logit_softcapping", None) or 0.0)
        self.factor = factor_of(inner.config)
        """Of all logits; here it is the last state's, so that logits are its product with the head."""
        self.dropout = without_dropout(inner)
        """What the config said of dropout, which is off: what is scored must be what was sampled from."""
        self.eval()
        ours = take_over(self.bare)
        self.check()
        self.replaced = ours and self._probe_replaced()

    @staticmethod
    def _sizes(config: Any, context: int) -> ForeignConfig:
        try:
            return ForeignConfig.of(config, context)
        except PanoplyError:
            raise
        except Exception as problem:  # of a config that has no one answer, such as heads of a size a layer
            raise PanoplyError(
                f"The architecture '{config.model_type}' cannot be used: {first_line(problem)}."
            ) from problem

    @property
    def packs(self) -> bool:
        """Whether rows are best packed: as in a model that runs natively."""
        if not self.replaced or self.device.type == "cpu":
            return self.replaced
        return self.dtype.itemsize == 2 and self.config.head_dim <= HEAD_SIZE and has_triton()

    @property
    def glances(self) -> bool:
        """Whether a kernel can attend where one new token a row is decoded."""
        return self.replaced and self.config.head_dim <= HEAD_SIZE and has_triton()

    @property
    def bare(self) -> Any:
        """transformers' own model, also where PEFT has wrapped it."""
        return self.inner.get_base_model() if self.adapted else self.inner

    @property
    def adapted(self) -> bool:
        """Whether PEFT's adapters learn in the place of the weights."""
        return hasattr(self.inner, "get_base_model")

    @property
    def head_weight(self) -> Tensor:
        weight: Tensor = self.bare.get_output_embeddings().weight
        return weight

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None = None,
        cache: Cache | Newest | None = None,
    ) -> Tensor:
        return self.hidden_states(tokens, positions, segments, cache)[0]

    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None = None,
        cache: Cache | Newest | None = None,
        taps: Collection[int] = (),
        packing: Packing | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        if segments is not None and cache is not None:
            raise ValueError("segments and a cache cannot be combined")
        if bad := [k for k in taps if not 0 <= k <= self.config.layers]:
            raise PanoplyError(f"There is no hidden state {bad[0]} in {self.config.layers} layers.")
        look: Look | None = None
        if packing is not None:
            look = PackedRow(packing, self.config.windows)
        elif isinstance(cache, Newest):
            look = NewestToken(cache, self.config.windows)
        masks = self._masks(positions, segments, cache) if look is None else self._no_masks()
        kept = None if cache is None else CacheAdapter(cache)
        return self._pass(tokens, positions, masks, kept, look, taps)

    def _pass(
        self,
        tokens: Tensor,
        positions: Tensor,
        masks: Masks,
        cache: CacheAdapter | None,
        look: Look | None,
        taps: Collection[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:
        with looking(look):
            out = self.bare.base_model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=masks,
                past_key_values=cache,
                use_cache=cache is not None,
                output_hidden_states=bool(taps),
            )
        tapped = {k: out.hidden_states[k] for k in taps}
        if self.config.layers in tapped:
            tapped[self.config.layers] = self._scaled(tapped[self.config.layers])
        return self._scaled(out.last_hidden_state), tapped

    def _scaled(self, state: Tensor) -> Tensor:
        return state if self.factor == 1.0 else state * self.factor

    def normed(self, state: Tensor) -> Tensor:
        """The final norm, by whichever name the architecture has it."""
        for name in ("norm", "ln_f", "final_layernorm", "final_layer_norm"):
            if (norm := getattr(self.bare.base_model, name, None)) is not None:
                return self._scaled(norm(state))
        raise PanoplyError(f"The architecture '{self.config.model_type}' has no final norm of a known name.")

    def logits(self, hidden: Tensor) -> Tensor:
        flat = wide_product(hidden.reshape(-1, hidden.shape[-1]), self.head_weight.t())
        z = flat.view(*hidden.shape[:-1], -1)
        return torch.tanh(z / self.softcap) * self.softcap if self.softcap else z

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.logits(self.hidden(tokens, positions))

    def new_cache(self, rows: int, capacity: int) -> Cache:
        from panoply.policies.attention import Cache

        c = self.config
        return Cache(c.layers, rows, c.kv_heads, capacity, c.head_dim, self.dtype, self.device)

    def write(self, folder: Path, shard_bytes: int) -> None:
        """As transformers saves it, with the config's own dropout; adapters are merged into a copy."""
        inner = copy.deepcopy(self.inner).merge_and_unload() if self.adapted else self.inner
        config = inner.config
        with quiet_transformers():
            try:
                vars(config).update(self.dropout)
                inner.save_pretrained(folder, max_shard_size=shard_bytes)
            finally:
                vars(config).update(dict.fromkeys(self.dropout, 0.0))

    def _visible_slots(self, cache: Cache, tokens: Tensor) -> int:
        """How many keys the cache will show, told by a write that the first layer's own write replaces."""
        shape = (tokens.shape[0], self.config.kv_heads, tokens.shape[1], self.config.head_dim)
        blank = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return cache.append(0, blank, blank)[0].shape[2]

    def _masks(self, positions: Tensor, segments: Tensor | None, cache: Any) -> Masks:
        """Additive masks of four dimensions, which transformers takes as they are."""
        slots = positions.shape[1] if cache is None else self._visible_slots(cache, positions)
        sight = Visibility(positions, segments, cache is not None, self.dtype)
        if sight.causal:
            return None
        windows = set(self.config.windows)
        return self._each_kind({w: sight.build(w if w < slots else 0, slots) for w in windows})

    def _no_masks(self) -> Masks:
        """Nothing that anybody looks at; without it transformers would make one as large as all pairs of tokens."""
        nothing = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        return self._each_kind(dict.fromkeys(self.config.windows, nothing))

    def _each_kind(self, masks: Mapping[int, Tensor]) -> Masks:
        """Masks by window as transformers wants them: one a kind of layer, or one for all."""
        windows, kinds = self.config.windows, self.config.kinds
        if not kinds:
            return masks[windows[0]]
        return {kind: masks[window] for kind, window in zip(kinds, windows, strict=True)}

    @torch.no_grad()
    def check(self) -> None:
        """Refuse a model of which one of these things is not so; with adapters, too."""
        name = self.config.model_type
        refusal = f"The architecture '{name}' cannot be used"
        bias = getattr(self.bare.get_output_embeddings(), "bias", None)
        if bias is not None and bool(bias.any()):
            raise PanoplyError(
                f"{refusal}: its head has a bias, so its logits are not its head times its last hidden state."
            )
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
            raise PanoplyError(f"{refusal}: {first_line(problem)}.") from problem
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

    @torch.no_grad()
    def _probe_replaced(self) -> bool:
        """Whether every layer asks for attention with just its own keys and values, and nothing else."""
        tokens, positions = (torch.arange(2, device=self.device)[None] for _ in range(2))
        cache, seen = self.new_cache(1, 2), Routed()
        cache.begin(positions, 2)
        self._pass(tokens, positions, self._no_masks(), CacheAdapter(cache, seen), seen)
        return seen.layers == set(range(self.config.layers))

    def _probe_cached(self, tokens: Tensor) -> Tensor:
        cache = self.new_cache(1, tokens.shape[1])
        parts = []
        for part in torch.split(torch.arange(tokens.shape[1], device=tokens.device)[None], [5, 6, 1], dim=1):
            cache.begin(part)
            parts.append(self.logits(self.hidden(tokens.gather(1, part), part, cache=cache)))
        return torch.cat(parts, dim=1)


def factor_of(config: Any) -> float:
    """What logits are multiplied by: Cohere's `logit_scale`, or `logits_scaling`, by which Granite's are divided."""
    scale, scaling = (getattr(config, name, None) or 1.0 for name in ("logit_scale", "logits_scaling"))
    if not (is_number(scale) and is_number(scaling)):
        return 1.0
    return float(scale / scaling if config.model_type.startswith("granite") else scale * scaling)


def without_dropout(inner: Any) -> dict[str, float]:
    """Turn dropout off, in every layer and wherever the config is asked for it; returns what the config said."""
    said = {}
    for name, value in list(vars(inner.config).items()):
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float) and value > 0:
            said[name] = value
            setattr(inner.config, name, 0.0)
    for layer in inner.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        for name, value in list(vars(layer).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)
    return said


def _positions(config: Any, context: int) -> int:
    """The longest sequence that transformers turns by the same factors from its first token to its last.

    Beyond it, with longrope or dynamic scaling, factors change while a sequence grows: what was sampled with some would
    be scored with others.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or 2048)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, Mapping)] or [rope]
    most = min(reach(kind, longest)[0] for kind in kinds)
    if context > most:
        raise PanoplyError(
            f"A '{config.model_type}', which runs through transformers, reads at most {most:,} tokens here: a context "
            f"of {context:,} is too long."
        )
    return context or most
