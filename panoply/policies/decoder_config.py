"""The shape of a decoder: read from and written to the `config.json` of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.policies import rotary
from panoply.policies.architectures import ARCHITECTURES, Architecture
from panoply.policies.config_reading import (
    ACTIVATE,
    activation_of,
    refuse_unsupported,
    rope_of,
    unrotated_of,
    windows_of,
)
from panoply.policies.config_schema import check_config
from panoply.policies.experts import Mixing, check_mixing, dense_of, described, mixing_of


@dataclass(frozen=True)
class DecoderConfig:
    """A new small model needs only its first four numbers: `DecoderConfig(32, width=64, layers=2, heads=4)`.

    `model_type` fixes what a layout does not let one choose; see `policies/architectures.py`.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int = 0
    """0: as many as heads."""
    head_dim: int = 0
    """0: width / heads."""
    inner: int = 0
    """Width of the feed-forward layer; 0: four times the width."""
    max_positions: int = 2048
    """The longest sequence, in tokens. Of longrope it decides by which factors all sequences turn (see rotary.py)."""
    longest: int = 0
    """What `max_position_embeddings` says, where that is something else; 0: the same."""
    model_type: str = "llama"
    tied: bool = False
    norm_eps: float = 1e-6
    activation: str = ""
    """`silu` or `gelu_pytorch_tanh`; empty: the layout's own."""
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """`rope_type` and its own numbers, as Hugging Face names them; empty: no scaling."""
    local_theta: float = 0.0
    """The base of layers with a window, which are not scaled, where a layout has that; 0: that of the others."""
    rotary_dim: int = 0
    """How many dimensions of a head are turned; 0: the layout's share of it."""
    unrotated: tuple[int, ...] = ()
    """Layers without positions."""
    attention_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int, ...] = ()
    """How many positions each layer sees, itself included; 0: all. Empty: all layers see all."""
    query_scalar: float = 0.0
    """Scores are divided by its root; 0: by the head size's."""
    attention_scale: float = 0.0
    """Or they are multiplied by this."""
    attention_cap: float = 0.0
    """c makes a score s c · tanh(s / c); 0: it stays."""
    logit_cap: float = 0.0
    """The same of logits."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Of what a block's halves add to the stream."""
    logit_divisor: float = 1.0
    mixing: Mixing | None = None
    """Of layouts whose feed-forward layers are mixtures of experts."""
    dense: tuple[int, ...] = ()
    """Those layers of them that are not."""
    extras: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Keys of `config.json` that do not touch the forward pass (token ids, dtype, …), kept as they were."""

    def __post_init__(self) -> None:
        def fill(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        fill("kv_heads", self.kv_heads or self.heads)
        fill("head_dim", self.head_dim or self.width // self.heads)
        fill("inner", self.inner or 4 * self.width)
        fill("windows", tuple(self.windows) or (0,) * self.layers)
        fill("longest", self.longest or self._longest())
        if self.model_type not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise PanoplyError(f"The decoder has no layout '{self.model_type}'; it has {known}.")
        if self.mixing is not None and self.layout.sparse and self.layout.sparse.inner == "intermediate_size":
            fill("inner", self.mixing.inner)
        fill("rotary_dim", self.rotary_dim or int(self.head_dim * self.layout.rotary_share))
        fill("activation", self.activation or self.layout.activation)
        if self.layout.local_theta:
            fill("local_theta", self.local_theta or self.rope_theta)
        if self.heads % self.kv_heads:
            raise PanoplyError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly.")
        if self.head_dim < 2 or self.head_dim % 2:
            raise PanoplyError(f"Rotary positions need an even head size, not {self.head_dim}.")
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise PanoplyError(
                f"{self.rotary_dim} of {self.head_dim} dimensions of a head (partial_rotary_factor) cannot be turned "
                "in pairs."
            )
        if self.activation not in ACTIVATE:
            known = " and ".join(ACTIVATE)
            raise PanoplyError(f"The decoder's activations are {known}; this model has '{self.activation}'.")
        self._check_layers()
        if self.rope_type not in rotary.TYPES:
            known = ", ".join(rotary.TYPES)
            raise PanoplyError(f"Rotary scaling '{self.rope_type}' is not supported; there is {known}.")

    def _check_layers(self) -> None:
        """What is said of single layers, and what the layout lets differ between them."""
        if len(self.windows) != self.layers:
            raise PanoplyError(f"{len(self.windows)} windows were given for {self.layers} layers.")
        if any(self.windows) and not self.layout.windows:
            raise PanoplyError(f"The {self.model_type} layout has no sliding window; use mistral or qwen3.")
        if self.layout.windows == "all" and len(set(self.windows)) > 1:
            raise PanoplyError(
                f"The {self.model_type} layout has one window for all layers; use qwen3 to vary it."
            )
        if len({w for w in self.windows if w}) > 1:
            raise PanoplyError("The windows of a model must be of one size, or 0.")
        if self.unrotated and not self.layout.unrotated:
            raise PanoplyError(f"All layers of the {self.model_type} layout have positions; use smollm3.")
        if bad := [i for i in self.unrotated if not 0 <= i < self.layers]:
            raise PanoplyError(f"There is no layer {bad[0]} among {self.layers} to be without positions.")
        named = {"query_scalar", "attention_scale", "attention_cap", "logit_cap", "logit_divisor"} | {
            "embedding_scale", "residual_scale",
        }  # fmt: skip
        lacking = named - set(self.layout.fields.values())
        lacking |= {"attention_bias"} if self.layout.qkv_bias is False else set()
        lacking |= {"mlp_bias"} if self.layout.mlp_bias is not None else set()
        for name in sorted(lacking):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise PanoplyError(f"The {self.model_type} layout has no {name}.")
        check_mixing(self.mixing, self.dense, self.layers, self.model_type, self.layout)
        if self.local_theta and not self.layout.local_theta:
            raise PanoplyError(f"The {self.model_type} layout turns all layers by one base.")

    @property
    def causal(self) -> bool:
        """Whether a token sees those before it alone; a masked-diffusion model sees all (`is_causal`: false)."""
        return self.extras.get("is_causal") is not False

    @property
    def layout(self) -> Architecture:
        return ARCHITECTURES[self.model_type]

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias if self.layout.qkv_bias is None else self.layout.qkv_bias

    @property
    def out_bias(self) -> bool:
        return self.attention_bias if self.layout.out_bias is None else self.layout.out_bias

    @property
    def gate_bias(self) -> bool:
        return self.mlp_bias if self.layout.mlp_bias is None else self.layout.mlp_bias

    @property
    def rope_type(self) -> str:
        return str(self.rope_scaling.get("rope_type", "default"))

    @property
    def score_scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return self.attention_scale or (self.query_scalar or self.head_dim) ** -0.5

    @property
    def plain(self) -> bool:
        """Whether a block is Llama's but for biases, windows and norms of queries and keys."""
        return self.layout.plain and self.activation == "silu" and self.rotary_dim == self.head_dim

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], where: str = "config.json", context: int = 0) -> DecoderConfig:
        """The shape that a `config.json` describes, once everything it is read for is of a type and size to believe.

        context   the longest sequence that is asked for; 0: what the model was made for
        """
        check_config(raw, where)
        model_type, heads, layers = raw["model_type"], raw["num_attention_heads"], raw["num_hidden_layers"]
        if model_type not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise PanoplyError(f"The decoder has no layout '{model_type}'; it has {known}.")
        layout = ARCHITECTURES[model_type]
        refuse_unsupported(raw, layout, where)
        given = {**layout.defaults, **raw}
        rope, local = rope_of(given, layout)
        head_dim = given.get("head_dim") or given["hidden_size"] // heads
        share = rope.pop("partial_rotary_factor", None) or given.get("partial_rotary_factor")
        longest = int(given.get("max_position_embeddings") or 2048)
        return cls(
            vocab_size=given["vocab_size"],
            width=given["hidden_size"],
            layers=layers,
            heads=heads,
            kv_heads=given.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            inner=given["intermediate_size"],
            max_positions=rotary.positions(rope, longest, context),
            longest=longest,
            model_type=model_type,
            tied=bool(given.get("tie_word_embeddings")),
            norm_eps=float(1e-6 if (eps := given.get("rms_norm_eps")) is None else eps),
            activation=activation_of(given, layout),
            rope_theta=float(rope.pop("rope_theta")),
            rope_scaling={} if rope.get("rope_type") == "default" else rope,
            local_theta=local,
            rotary_dim=int(head_dim * (share or layout.rotary_share)),
            unrotated=unrotated_of(given, layout, layers),
            attention_bias=bool(given.get("attention_bias")),
            mlp_bias=bool(given.get("mlp_bias")) and layout.mlp_bias is None,
            windows=windows_of(given, layout, layers),
            extras=dict(raw),
            mixing=mixing_of(raw, layout),
            dense=dense_of(raw, layout, layers),
            **{ours: float(given[name] or 0.0) for name, ours in layout.fields.items() if name in given},
        )

    def to_hf(self) -> dict[str, Any]:
        """Rotary settings are written in both spellings, for readers before and after transformers 5.

        Code that lay beside the model (`auto_map`) is not asked for: it is not written.
        """
        window, layout = max(self.windows), self.layout
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default", **self.rope_scaling}
        if layout.turns_partly:
            rope["partial_rotary_factor"] = self.rotary_dim / self.head_dim
        ours: dict[str, Any] = {
            "architectures": [layout.name],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "max_position_embeddings": self.longest,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": self.norm_eps,
            layout.activation_key: self.activation,
            "rope_theta": self.rope_theta,
            "rope_scaling": self._older_scaling(),
            "rope_parameters": rope,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "sliding_window": window or self._unused_window(),
        }
        if layout.local_theta:
            local = {"rope_type": "default", "rope_theta": self.local_theta}
            ours["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
            ours["rope_local_base_freq"] = local["rope_theta"]
        if "partial_rotary_factor" in rope:
            ours["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if self.rope_type == "longrope":  # where transformers looks for it first
            ours["original_max_position_embeddings"] = self.rope_scaling["original_max_position_embeddings"]
        if layout.windows == "layers":
            ours["layer_types"] = ["sliding_attention" if w else "full_attention" for w in self.windows]
        if layout.window_switch:
            ours["use_sliding_window"] = window > 0
        if layout.unrotated:
            ours["no_rope_layers"] = [int(i not in self.unrotated) for i in range(self.layers)]
        ours |= {name: self._written(mine) for name, mine in layout.fields.items()}
        ours |= described(self.mixing, self.dense, layout)
        defaults = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        kept = {name: value for name, value in self.extras.items() if name != "auto_map"}
        return {**defaults, **kept, **ours}

    def _older_scaling(self) -> dict[str, Any] | None:
        """As it was said before transformers 5. Where that has to be terse, what other settings imply is left out."""
        rope = dict(self.rope_scaling)
        if not self.layout.terse_scaling or self.rope_type != "longrope":
            return rope or None
        original = float(rope["original_max_position_embeddings"])
        factors = {name: rope.get(name) for name in ("short_factor", "long_factor")}
        implied = {"rope_type", "original_max_position_embeddings", *factors}
        if rope.get("factor") == self.longest / original:
            implied.add("factor")
        return rope if rope.keys() - implied else {"type": "longrope", **factors}

    def _unused_window(self) -> int | None:
        """Of a config without windows: transformers wants a number where layers could differ."""
        if self.layout.windows != "layers":
            return None
        said = self.extras.get("sliding_window") or self.layout.defaults.get("sliding_window")
        return None if said is None else int(said)

    def _longest(self) -> int:
        """Of a config made by hand: with longrope, what its factor makes of the original length."""
        if self.rope_type != "longrope":
            return self.max_positions
        original = self.rope_scaling.get("original_max_position_embeddings") or self.max_positions
        return max(self.max_positions, round(original * float(self.rope_scaling.get("factor") or 1.0)))

    @property
    def most_positions(self) -> int:
        """The longest sequence that it could be opened for."""
        return rotary.reach(self.rope_scaling, self.longest)[1]

    def _written(self, name: str) -> float | int | None:
        """A number of the layout's `fields` as a config says it: a cap that is not there is null."""
        own = {"query_scalar": float(self.head_dim), "attention_scale": self.score_scale}
        value: float = getattr(self, name) or own.get(name, 0.0)
        return int(value) if name == "query_scalar" and value == int(value) else value or None

    @property
    def rotary(self) -> tuple[int, ...]:
        """Of each layer, which of `frequencies` it turns by."""
        tables = self._tables()
        return tuple(tables.index(self._turning(i)) for i in range(self.layers))

    def frequencies(self) -> list[tuple[Tensor, float]]:
        """Radians per position for each pair of dimensions, and YaRN's factor on cosine and sine.

        One for each way in which layers turn: all alike, by two bases, or (all 0) not at all.
        """
        found = []
        for kind in self._tables():
            if kind == "none":
                found.append((torch.zeros(self.rotary_dim // 2, device="cpu"), 1.0))
            elif kind == "local":
                found.append((rotary.plain(self.rotary_dim, self.local_theta), 1.0))
            else:
                found.append(
                    rotary.scaled(self.rotary_dim, self.rope_theta, self.rope_scaling, self.max_positions)
                )
        return found

    def _turning(self, layer: int) -> str:
        if layer in self.unrotated:
            return "none"
        return "local" if self.local_theta and self.windows[layer] else "all"

    def _tables(self) -> list[str]:
        return list(dict.fromkeys(self._turning(i) for i in range(self.layers)))
