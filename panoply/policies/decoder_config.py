"""The shape of a decoder: read from and written to the `config.json` of a Hugging Face folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.files import brief, conform, is_number

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""What each kind of scaling must say."""
SIZES: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "num_hidden_layers": (1, 1000),
    "num_attention_heads": (1, 2**16),
    "num_key_value_heads": (1, 2**16),
    "head_dim": (2, 2**16),
    "intermediate_size": (1, 2**24),
    "max_position_embeddings": (1, 2**31),
    "sliding_window": (0, 2**31),
    "max_window_layers": (0, 2**31),
    "rms_norm_eps": (0, 1),
    "rope_theta": (1.001, 1e30),
    "partial_rotary_factor": (0, 1),
    "n_embd": (1, 2**20),
    "n_layer": (1, 1000),
    "n_head": (1, 2**16),
    "n_positions": (1, 2**24),
    "n_inner": (1, 2**24),
}
"""What can be believed of a model's sizes, under the names of all architectures."""
POSITIVE = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "rope_theta",
)  # fmt: skip
"""Numbers of rotary scaling, all above 0."""


class Rope(TypedDict):
    """`rope_scaling`, or `rope_parameters` from transformers 5 on."""

    rope_type: NotRequired[str | None]
    type: NotRequired[str | None]
    rope_theta: NotRequired[float | None]
    factor: NotRequired[float | None]
    low_freq_factor: NotRequired[float | None]
    high_freq_factor: NotRequired[float | None]
    original_max_position_embeddings: NotRequired[float | None]
    beta_fast: NotRequired[float | None]
    beta_slow: NotRequired[float | None]
    mscale: NotRequired[float | None]
    mscale_all_dim: NotRequired[float | None]
    attention_factor: NotRequired[float | None]
    truncate: NotRequired[bool | None]
    partial_rotary_factor: NotRequired[float | None]


class HfConfig(TypedDict):
    """What is read of the `config.json` of the layouts above; other keys are kept as they are."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    num_key_value_heads: NotRequired[int | None]
    head_dim: NotRequired[int | None]
    max_position_embeddings: NotRequired[int | None]
    tie_word_embeddings: NotRequired[bool | None]
    rms_norm_eps: NotRequired[float | None]
    rope_theta: NotRequired[float | None]
    rope_scaling: NotRequired[Rope | None]
    rope_parameters: NotRequired[Rope | None]
    partial_rotary_factor: NotRequired[float | None]
    attention_bias: NotRequired[bool | None]
    mlp_bias: NotRequired[bool | None]
    sliding_window: NotRequired[int | None]
    use_sliding_window: NotRequired[bool | None]
    max_window_layers: NotRequired[int | None]
    layer_types: NotRequired[list[str] | None]
    hidden_act: NotRequired[str | None]


@dataclass(frozen=True)
class DecoderConfig:
    """A new small model needs only its first four numbers: `DecoderConfig(32, width=64, layers=2, heads=4)`.

    `model_type` fixes what a layout does not let one choose: Qwen2 has biases on q, k and v, Qwen3 normalises
    queries and keys, only Mistral and the Qwens have windows.
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
    model_type: str = "llama"
    tied: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """`rope_type` and its own numbers, as Hugging Face names them; empty: no scaling."""
    attention_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int, ...] = ()
    """How many positions each layer sees, itself included; 0: all. Empty: all layers see all."""
    extras: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Keys of `config.json` that do not touch the forward pass (token ids, dtype, …), kept as they were."""

    def __post_init__(self) -> None:
        def fill(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        fill("kv_heads", self.kv_heads or self.heads)
        fill("head_dim", self.head_dim or self.width // self.heads)
        fill("inner", self.inner or 4 * self.width)
        fill("windows", tuple(self.windows) or (0,) * self.layers)
        if self.model_type not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise PanoplyError(f"The decoder has no layout '{self.model_type}'; it has {known}.")
        if self.heads % self.kv_heads:
            raise PanoplyError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly.")
        if self.head_dim < 2 or self.head_dim % 2:
            raise PanoplyError(f"Rotary positions need an even head size, not {self.head_dim}.")
        if len(self.windows) != self.layers:
            raise PanoplyError(f"{len(self.windows)} windows were given for {self.layers} layers.")
        if self.model_type == "llama" and any(self.windows):
            raise PanoplyError("The llama layout has no sliding window; use mistral or qwen3.")
        if self.model_type == "mistral" and len(set(self.windows)) > 1:
            raise PanoplyError("The mistral layout has one window for all layers; use qwen3 to vary it.")
        if len({w for w in self.windows if w}) > 1:
            raise PanoplyError("The windows of a model must be of one size, or 0.")
        if self.rope_type not in ROPE_TYPES:
            known = ", ".join(ROPE_TYPES)
            raise PanoplyError(f"Rotary scaling '{self.rope_type}' is not supported; there is {known}.")

    @property
    def qkv_bias(self) -> bool:
        return self.model_type == "qwen2" or (self.attention_bias and self.model_type != "mistral")

    @property
    def out_bias(self) -> bool:
        return self.attention_bias and self.model_type in ("llama", "qwen3")

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "qwen3"

    @property
    def rope_type(self) -> str:
        return str(self.rope_scaling.get("rope_type", "default"))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], where: str = "config.json") -> DecoderConfig:
        """The shape that a `config.json` describes, once everything it is read for is of a type and size to believe."""
        check_config(raw, where)
        _refuse_unsupported(raw)
        model_type, heads, layers = raw["model_type"], raw["num_attention_heads"], raw["num_hidden_layers"]
        rope = _rope_of(raw)
        return cls(
            vocab_size=raw["vocab_size"],
            width=raw["hidden_size"],
            layers=layers,
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or (8 if model_type == "mistral" else heads),
            head_dim=raw.get("head_dim") or (128 if model_type == "qwen3" else 0),
            inner=raw["intermediate_size"],
            max_positions=raw.get("max_position_embeddings") or 2048,
            model_type=model_type,
            tied=bool(raw.get("tie_word_embeddings")),
            norm_eps=float(raw.get("rms_norm_eps") or 1e-6),
            rope_theta=float(rope.pop("rope_theta")),
            rope_scaling={} if rope.get("rope_type") == "default" else rope,
            attention_bias=bool(raw.get("attention_bias")),
            mlp_bias=bool(raw.get("mlp_bias")) and model_type == "llama",
            windows=_windows_of(raw, model_type, layers),
            extras=dict(raw),
        )

    def to_hf(self) -> dict[str, Any]:
        """Rotary settings are written in both spellings, for readers before and after transformers 5."""
        window = max(self.windows)
        rope = {"rope_theta": self.rope_theta, "rope_type": "default", **self.rope_scaling}
        ours: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": dict(self.rope_scaling) or None,
            "rope_parameters": rope,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "sliding_window": window or None,
        }
        if self.model_type.startswith("qwen"):
            kinds = ["sliding_attention" if w else "full_attention" for w in self.windows]
            ours |= {"use_sliding_window": window > 0, "layer_types": kinds}
        defaults = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return {**defaults, **self.extras, **ours}

    def frequencies(self) -> tuple[Tensor, float]:
        """Radians per position for each pair of dimensions, and YaRN's factor on cosine and sine."""
        return _frequencies(self)


def check_config(raw: Mapping[str, Any], where: str) -> None:
    """Refuse numbers that are no numbers, and sizes that no model has: what follows would trust them."""
    conform(raw, HfConfig, where)
    check_sizes(raw, where)
    for group in ("rope_scaling", "rope_parameters"):
        for name, value in (raw.get(group) or {}).items():
            if name in POSITIVE and value is not None and not value > 0:
                raise PanoplyError(f"{where} cannot be used: {group}.{name} is above 0, not {value:g}.")


def check_sizes(raw: Mapping[str, Any], where: str) -> None:
    """The same for any architecture, of those sizes that it has."""
    for name, (least, most) in SIZES.items():
        value = raw.get(name)
        if value is None:
            continue
        if not is_number(value):
            raise PanoplyError(f"{where} cannot be used: {name} is a number, not {brief(value)}.")
        if not least <= value <= most:
            raise PanoplyError(
                f"{where} cannot be used: {name} is from {least:,} to {most:,}, not {value:,}."
            )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if (raw.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise PanoplyError(f"The decoder's activation is silu; this model has '{raw['hidden_act']}'.")
    if raw.get("quantization_config"):
        raise PanoplyError("This folder holds quantised weights; give the full-precision one.")
    rope = raw.get("rope_parameters") or {}
    if float(raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise PanoplyError("Rotary positions on a part of the head are not supported.")


def _rope_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` beside `rope_scaling` (before)."""
    rope = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta") or 10_000.0)
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if rope["rope_type"] in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    return rope


def _windows_of(raw: Mapping[str, Any], model_type: str, layers: int) -> tuple[int, ...]:
    if model_type == "mistral":
        # A config that does not mention it has transformers' default.
        return (raw.get("sliding_window", 4096) or 0,) * layers
    if not model_type.startswith("qwen") or not raw.get("use_sliding_window"):
        return ()
    window, first = raw.get("sliding_window", 4096) or 0, raw.get("max_window_layers", 28)
    first = 28 if first is None else first
    kinds = raw.get("layer_types") or ["sliding_attention" if i >= first else "" for i in range(layers)]
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _frequencies(config: DecoderConfig) -> tuple[Tensor, float]:
    size, base, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    steps = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    plain = 1.0 / base**steps
    kind = config.rope_type
    try:
        if kind == "linear":
            return plain / float(scaling["factor"]), 1.0
        if kind == "llama3":
            return _llama3(plain, scaling), 1.0
        if kind == "yarn":
            return _yarn(plain, base, scaling)
    except (KeyError, TypeError) as missing:
        names = ", ".join(NEEDED[kind]) if isinstance(missing, TypeError) else missing
        raise PanoplyError(f"Rotary scaling '{kind}' needs {names} in config.json.") from None
    return plain, 1.0


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    if not low < high:
        raise PanoplyError(
            f"Rotary scaling 'llama3' needs low_freq_factor below high_freq_factor, not {low:g} and {high:g}."
        )
    turns = float(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * keep + plain / factor * (1 - keep)


def _yarn(plain: Tensor, base: float, scaling: Mapping[str, Any]) -> tuple[Tensor, float]:
    """As llama3, but the blend is linear in the dimension's index; attention is sharpened besides."""
    factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    size = 2 * len(plain)

    def index_of(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = index_of(scaling.get("beta_fast") or 32), index_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = (torch.arange(len(plain), dtype=torch.float32, device="cpu") - low) / (max(high - low, 0) or 0.001)
    keep = 1 - ramp.clamp(0, 1)

    def sharpening(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        top, bottom = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = sharpening(top) / sharpening(bottom) if top and bottom else sharpening(1.0)
    return plain * keep + plain / factor * (1 - keep), float(attention)
