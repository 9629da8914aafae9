"""What is read of a model's `config.json`, and which types and sizes of it can be believed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from panoply.errors import PanoplyError
from panoply.files import brief, conform, is_number

SIZES: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "num_hidden_layers": (1, 1000),
    "num_attention_heads": (1, 2**16),
    "num_key_value_heads": (1, 2**16),
    "head_dim": (2, 2**16),
    "intermediate_size": (1, 2**24),
    "max_position_embeddings": (1, 2**31),
    "original_max_position_embeddings": (2, 2**31),
    "sliding_window": (0, 2**31),
    "max_window_layers": (0, 2**31),
    "rms_norm_eps": (0, 1),
    "rope_theta": (1.001, 1e30),
    "rope_local_base_freq": (1.001, 1e30),
    "sliding_window_pattern": (1, 1000),
    "no_rope_layer_interval": (1, 1000),
    "query_pre_attn_scalar": (1e-6, 1e6),
    "attn_logit_softcapping": (1e-3, 1e9),
    "final_logit_softcapping": (1e-3, 1e9),
    "embedding_multiplier": (1e-6, 1e6),
    "residual_multiplier": (1e-6, 1e6),
    "attention_multiplier": (1e-9, 1e6),
    "logits_scaling": (1e-6, 1e6),
    "partial_rotary_factor": (0, 1),
    "num_experts": (0, 2**16),
    "num_local_experts": (0, 2**16),
    "num_experts_per_tok": (0, 2**10),
    "moe_intermediate_size": (1, 2**24),
    "decoder_sparse_step": (1, 1000),
    "swiglu_alpha": (0, 1e6),
    "swiglu_limit": (1e-6, 1e6),
    "n_embd": (1, 2**20),
    "n_layer": (1, 1000),
    "n_head": (1, 2**16),
    "n_positions": (1, 2**24),
    "n_inner": (1, 2**24),
}
"""What can be believed of a model's sizes, under the names of all architectures."""
ROPE_SIZES: dict[str, tuple[float, float]] = {
    "rope_theta": SIZES["rope_theta"],
    "factor": (1e-3, 10**6),
    "low_freq_factor": (1e-3, 10**6),
    "high_freq_factor": (1e-3, 10**6),
    "original_max_position_embeddings": SIZES["original_max_position_embeddings"],
    "beta_fast": (1e-3, 10**6),
    "beta_slow": (1e-3, 10**6),
    "mscale": (0, 1000),
    "mscale_all_dim": (0, 1000),
    "attention_factor": (1e-3, 1000),
    "attn_factor": (1e-3, 1000),
    "short_factor": (1e-3, 10**6),
    "long_factor": (1e-3, 10**6),
}
"""The same of numbers, and of lists of them, by which rotary positions are scaled."""


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
    attn_factor: NotRequired[float | None]
    truncate: NotRequired[bool | None]
    short_factor: NotRequired[list[float] | None]
    long_factor: NotRequired[list[float] | None]
    partial_rotary_factor: NotRequired[float | None]
    full_attention: NotRequired[dict[str, Any] | None]
    sliding_attention: NotRequired[dict[str, Any] | None]


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
    original_max_position_embeddings: NotRequired[int | None]
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
    sliding_window_pattern: NotRequired[int | None]
    no_rope_layers: NotRequired[list[int] | None]
    no_rope_layer_interval: NotRequired[int | None]
    rope_local_base_freq: NotRequired[float | None]
    hidden_act: NotRequired[str | None]
    hidden_activation: NotRequired[str | None]
    query_pre_attn_scalar: NotRequired[float | None]
    attn_logit_softcapping: NotRequired[float | None]
    final_logit_softcapping: NotRequired[float | None]
    embedding_multiplier: NotRequired[float | None]
    residual_multiplier: NotRequired[float | None]
    attention_multiplier: NotRequired[float | None]
    logits_scaling: NotRequired[float | None]
    num_experts: NotRequired[int | None]
    num_local_experts: NotRequired[int | None]
    num_experts_per_tok: NotRequired[int | None]
    moe_intermediate_size: NotRequired[int | None]
    norm_topk_prob: NotRequired[bool | None]
    decoder_sparse_step: NotRequired[int | None]
    mlp_only_layers: NotRequired[list[int] | None]
    router_jitter_noise: NotRequired[float | None]
    swiglu_alpha: NotRequired[float | None]
    swiglu_limit: NotRequired[float | None]
    clip_qkv: NotRequired[float | None]


def check_config(raw: Mapping[str, Any], where: str) -> None:
    """Refuse numbers that are no numbers, and sizes that no model has: what follows would trust them."""
    conform(raw, HfConfig, where)
    check_sizes(raw, where)
    for group in ("rope_scaling", "rope_parameters"):
        rope = raw.get(group) or {}
        _check_rope(rope, group, where)
        for kind in ("full_attention", "sliding_attention"):
            if rope.get(kind):
                conform(rope[kind], Rope, f"{group}.{kind} of {where}")
                _check_rope(rope[kind], f"{group}.{kind}", where)


def _check_rope(rope: Mapping[str, Any], group: str, where: str) -> None:
    for name in ROPE_SIZES.keys() & rope.keys():
        values = rope[name] if isinstance(rope[name], list) else [rope[name]]
        for value in values:
            if value is not None:
                _check_size(value, ROPE_SIZES[name], f"{group}.{name}", where)


def check_sizes(raw: Mapping[str, Any], where: str) -> None:
    """The same for any architecture, of those sizes that it has."""
    for name, bounds in SIZES.items():
        value = raw.get(name)
        if value is None:
            continue
        if not is_number(value):
            raise PanoplyError(f"{where} cannot be used: {name} is a number, not {brief(value)}.")
        _check_size(value, bounds, name, where)


def _check_size(value: float, bounds: tuple[float, float], name: str, where: str) -> None:
    least, most = bounds
    if not least <= value <= most:
        raise PanoplyError(f"{where} cannot be used: {name} is from {least:,} to {most:,}, not {value:,}.")
