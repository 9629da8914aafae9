"""Which settings of a model's `config.json` are understood. Any other may change the forward pass, and is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from panoply.errors import PanoplyError, plain
from panoply.files import brief
from panoply.policies.architectures import Architecture
from panoply.policies.config_schema import Rope

READ = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "original_max_position_embeddings",
    "tie_word_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "hidden_act", "hidden_activation", "layer_types", "is_causal", "clip_qkv", "quantization_config",
)  # fmt: skip
"""What is read for every layout, or refused with a sentence of its own."""
PARTLY = "partial_rotary_factor"
"""Read of layouts that turn a part of a head; transformers passes it over in others, if it does not fail there."""
ROUTING = (
    "num_experts", "num_local_experts", "num_experts_per_tok", "experts_per_token", "router_jitter_noise",
    "router_aux_loss_coef",
)  # fmt: skip
"""What is read of layouts with experts."""
MIXED = ("moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers")
"""And of those that have layers without."""
ABOUT = (
    "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "name_or_path", "model_name",
    "tokenizer_class", "finetuning_task", "task_specific_params", "problem_type", "id2label", "label2id", "num_labels",
    "use_cache", "cache_implementation", "return_dict", "output_hidden_states", "output_attentions",
    "output_router_logits", "attn_implementation", "gradient_checkpointing", "use_reentrant_checkpointing",
    "pretraining_tp", "tensor_parallel_size", "tp_size", "torchscript", "use_bfloat16", "tf_legacy_loss",
    "is_encoder_decoder", "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder",
    "pruned_heads", "chunk_size_feed_forward", "neftune_noise_alpha", "is_llama_config", "is_qwen2_config",
    "use_flash_attention", "use_flash_attn", "trust_remote_code", "keys_to_ignore_at_inference",
)  # fmt: skip
"""What says where a model comes from and how it is run or trained, and not what it computes."""
LENGTHS = (
    "initial_context_length", "max_sequence_length", "max_seq_len", "max_seq_length", "seq_length", "model_max_length",
    "tokenizer_model_max_length", "tokenizer_padding_side",
)  # fmt: skip
"""How long sequences were, by names that nobody reads: `max_position_embeddings` says it."""
GENERATION = (
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "prefix",
)  # fmt: skip
"""How text is generated, which older configs say, too."""
HARMLESS = frozenset((*ABOUT, *LENGTHS, *GENERATION))
TRAINED = ("dropout", "pdrop", "initializer", "token_id")
"""A setting whose name holds one of these is about training, or names a token."""
PRIVATE = ("_", "unsloth_", "transformers.js")
"""A setting whose name begins so is a note of a library to itself."""


def check_understood(raw: Mapping[str, Any], layout: Architecture) -> None:
    """Refuse a config that asks for something which the layout is not known to have."""
    known = understood(layout)
    for name, value in raw.items():
        same = _same(name, raw, layout)
        denied = value is False and any(meant is True for meant in same)
        if not (name in known or (_says_nothing(value) and not denied) or value in same):
            raise PanoplyError(
                f"config.json sets {plain(name)} to {brief(value)}, and what that does to a {raw['model_type']} layout "
                "is not known here: take it out of config.json if the model is the same without."
            )
    for group in ("rope_scaling", "rope_parameters"):
        for where, rope in _settings_of(raw.get(group) or {}, group):
            unread = {PARTLY} - known
            if "yarn" not in (rope.get("rope_type"), rope.get("type")):
                unread = unread | {"attn_factor"}
            strange = [
                n
                for n, v in rope.items()
                if (n not in ROPE and not _says_nothing(v)) or (n in unread and v not in (None, 1))
            ]
            if strange:
                raise PanoplyError(
                    f"config.json sets {where}.{plain(strange[0])} to {brief(rope[strange[0]])}, and what that does to "
                    "positions is not known here: take it out of config.json if the model is the same without."
                )


def understood(layout: Architecture) -> Known:
    """The settings that may stand in a config of a layout."""
    names = {*READ, *HARMLESS, *layout.fields}
    if layout.qkv_bias is not False:
        names.add("attention_bias")
    if layout.mlp_bias is None:
        names.add("mlp_bias")
    if layout.windows:
        names.add("sliding_window")
    if layout.windows == "layers":
        names.add("sliding_window_pattern")
    if layout.window_switch:
        names |= {"use_sliding_window", "max_window_layers"}
    if layout.local_theta:
        names.add("rope_local_base_freq")
    if layout.turns_partly:
        names.add(PARTLY)
    if layout.unrotated:
        names |= {"no_rope_layers", "no_rope_layer_interval"}
    if layout.sparse:
        names |= {*ROUTING}
        if layout.sparse.normalised is None:
            names.add("norm_topk_prob")
        if layout.sparse.inner in MIXED:
            names |= {*MIXED}
        if layout.sparse.clamped:
            names |= {"swiglu_alpha", "swiglu_limit"}
    return Known(names)


class Known(frozenset[str]):
    """Names of settings, those included that are alike whatever the model."""

    def __contains__(self, name: object) -> bool:
        said = str(name)
        return super().__contains__(name) or said.startswith(PRIVATE) or any(word in said for word in TRAINED)


ROPE = Known((*Rope.__annotations__, "finetuned"))


def _same(name: str, raw: Mapping[str, Any], layout: Architecture) -> tuple[Any, ...]:
    """Values by which a setting that nobody reads says what the model does anyway."""
    return {
        "activation": ("swiglu", "silu") if layout.activation == "silu" else (),
        "use_qk_norm": (bool(layout.qk_norm),),
        "qkv_bias": (layout.qkv_bias is True,),
        "scoring_func": ("softmax",) if layout.sparse else (),
        "norm_topk_prob": (layout.sparse.normalised,) if layout.sparse else (),
        "decoder_sparse_step": (1,) if layout.sparse else (),
        PARTLY: (1,),
        "sliding_window_size": (raw.get("sliding_window"),) if layout.windows else (),
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
    }.get(name, ())


def _says_nothing(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {}) or (value == 0 and value is not True)


def _settings_of(rope: Mapping[str, Any], group: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The settings of all layers, and of each kind where there are several."""
    kinds = [(f"{group}.{kind}", inner) for kind, inner in rope.items() if isinstance(inner, Mapping)]
    return [(group, rope), *kinds]
