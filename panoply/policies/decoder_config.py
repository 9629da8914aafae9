"""The shape of a decoder: read from and written to the `config.json` of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.files import brief
from panoply.policies import rotary
from panoply.policies.architectures import ARCHITECTURES, Architecture, without_positions
from panoply.policies.config_fields import check_understood
from panoply.policies.config_schema import check_config
from panoply.policies.experts import Mixing, check_mixing, dense_of, described, mixing_of

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_pytorch_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}
"""What may stand in a config, and what is meant."""


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
    """The base of layers with a window, which are not scaled; 0: they turn as the others do."""
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
        if self.heads % self.kv_heads:
            raise PanoplyError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly.")
        if self.head_dim < 2 or self.head_dim % 2:
            raise PanoplyError(f"Rotary positions need an even head size, not {self.head_dim}.")
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise PanoplyError(
                f"{self.rotary_dim} of {self.head_dim} dimensions of a head cannot be turned in pairs."
            )
        if self.activation not in ACTIVATIONS.values():
            known = " and ".join(dict.fromkeys(ACTIVATIONS.values()))
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
        for name in sorted(named - set(self.layout.fields.values())):
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
        _refuse_unsupported(raw, layout)
        given = {**layout.defaults, **raw}
        rope, local = _rope_of(given, layout)
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
            norm_eps=float(given.get("rms_norm_eps") or 1e-6),
            activation=_activation_of(given, layout),
            rope_theta=float(rope.pop("rope_theta")),
            rope_scaling={} if rope.get("rope_type") == "default" else rope,
            local_theta=local,
            rotary_dim=int(head_dim * (share or layout.rotary_share)),
            unrotated=_unrotated_of(given, layout, layers),
            attention_bias=bool(given.get("attention_bias")),
            mlp_bias=bool(given.get("mlp_bias")) and layout.mlp_bias is None,
            windows=_windows_of(given, layout, layers),
            extras=dict(raw),
            mixing=mixing_of(raw, layout),
            dense=dense_of(raw, layout, layers),
            **{ours: float(given[name] or 0.0) for name, ours in layout.fields.items() if name in given},
        )

    def to_hf(self) -> dict[str, Any]:
        """Rotary settings are written in both spellings, for readers before and after transformers 5."""
        window, layout = max(self.windows), self.layout
        rope: dict[str, Any] = {"rope_theta": self.rope_theta, "rope_type": "default", **self.rope_scaling}
        if self.rotary_dim != self.head_dim or layout.rotary_share != 1.0:
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
            "rope_scaling": dict(self.rope_scaling) or None,
            "rope_parameters": rope,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "sliding_window": window or None,
        }
        if layout.local_theta:
            local = {"rope_type": "default", "rope_theta": self.local_theta or self.rope_theta}
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
        return {**defaults, **self.extras, **ours}

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


def _refuse_unsupported(raw: Mapping[str, Any], layout: Architecture) -> None:
    if raw.get("quantization_config"):
        raise PanoplyError(
            "This folder holds quantised weights; give the full-precision one (transformers opens gpt-oss's with "
            "Mxfp4Config(dequantize=True), and can save it so)."
            if raw["model_type"] == "gpt_oss"
            else "This folder holds quantised weights; give the full-precision one."
        )
    if raw.get("clip_qkv"):
        raise PanoplyError("Queries, keys and values that are clipped (clip_qkv) are not supported.")
    check_understood(raw, layout)


def _activation_of(raw: Mapping[str, Any], layout: Architecture) -> str:
    """By the layout's own key, which older configs call `hidden_act`. Gemma's 'gelu' always meant its approximation."""
    named = raw.get(layout.activation_key) or raw.get("hidden_act") or layout.activation
    if named == "gelu" and layout.activation == "gelu_pytorch_tanh":
        return layout.activation
    return ACTIVATIONS.get(named, named)


def _rope_of(raw: Mapping[str, Any], layout: Architecture) -> tuple[dict[str, Any], float]:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` beside `rope_scaling` (before).

    With them the base of layers with a window, where those have one of their own.
    """
    rope, local = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {}), 0.0
    if layout.local_theta:
        kinds = raw.get("rope_parameters") or {}
        near = kinds.get("sliding_attention") or {}
        if (near.get("rope_type") or "default") != "default":
            raise PanoplyError(
                f"Rotary scaling '{near['rope_type']}' of layers with a window is not supported."
            )
        local = float(near.get("rope_theta") or raw.get("rope_local_base_freq") or layout.local_theta)
        rope = {**(kinds.get("full_attention") or {}), **(raw.get("rope_scaling") or {})}
    elif {"full_attention", "sliding_attention"} & rope.keys():
        raise PanoplyError("Rotary settings for each kind of layer are not part of this layout.")
    rope.setdefault("rope_theta", raw.get("rope_theta") or 10_000.0)
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if rope["rope_type"] == "su" or (
        rope["rope_type"] == "yarn" and rope.get("short_factor")
    ):  # its first names
        rope["rope_type"] = "longrope"
    longest = raw.get("max_position_embeddings")
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        of_all = None if layout.local_theta else raw.get("original_max_position_embeddings")
        original = of_all or rope.get("original_max_position_embeddings") or longest or 2048
        rope["original_max_position_embeddings"] = original
        if rope["rope_type"] == "longrope":
            rope["factor"] = rope.get("factor") or (longest or original) / original
    return rope, local


def _unrotated_of(raw: Mapping[str, Any], layout: Architecture, layers: int) -> tuple[int, ...]:
    if not layout.unrotated:
        return ()
    still = without_positions(raw, layers)
    if len(still) < layers:
        raise PanoplyError(f"no_rope_layers of config.json is of {len(still)} layers, not of {layers}.")
    return tuple(i for i in range(layers) if still[i])


def _windows_of(raw: Mapping[str, Any], layout: Architecture, layers: int) -> tuple[int, ...]:
    window, kinds = raw.get("sliding_window") or 0, raw.get("layer_types")
    if not layout.windows or (layout.window_switch and not raw.get("use_sliding_window")):
        window = 0
    if kinds is not None:
        _check_kinds(kinds, window, layout, layers)
    if not window:
        return ()
    if layout.windows == "all":
        return (window,) * layers
    if kinds is None:
        return tuple(window if near else 0 for near in layout.pattern(raw, layers)[:layers])
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _check_kinds(kinds: Sequence[str], window: int, layout: Architecture, layers: int) -> None:
    """Refuse kinds of layers that a layout does not have, whether or not they would make a difference."""
    if len(kinds) != layers:
        raise PanoplyError(f"layer_types of config.json is of {len(kinds)} layers, not of {layers}.")
    strange = set(kinds) - {"full_attention", *(["sliding_attention"] if layout.windows else [])}
    if layout.windows == "all" and window and "full_attention" in kinds:
        strange = {"full_attention"}
    if strange:
        raise PanoplyError(f"Layers of kind {brief(min(strange))} are not known to this layout.")
