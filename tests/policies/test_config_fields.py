"""Settings of `config.json`: those that published models have are understood, and any other is named and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from panoply.errors import PanoplyError
from panoply.policies.architectures import ARCHITECTURES
from panoply.policies.config_fields import understood
from panoply.policies.decoder import Decoder
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.folder import load_model, save_model

ALL: dict[str, Any] = {
    "_name_or_path": "somebody/something", "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 3],
    "pad_token_id": 2, "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02, "intermediate_size": 96,
    "max_position_embeddings": 131072, "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "vocab_size": 300,
    "_attn_implementation_autoset": True,
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
QWEN = {"max_window_layers": 28, "sliding_window": 32768, "use_sliding_window": False}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001}
QWEN_EXPERTS = {
    **QWEN, **EXPERTS, "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 16, "mlp_only_layers": [],
    "moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts": 4, "sliding_window": None,
}  # fmt: skip
PHI = {
    "attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
}  # fmt: skip
GEMMA = {"attention_bias": False, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
NEAR_AND_FAR = ["sliding_attention", "full_attention"] * 2
OLMO3_YARN = {
    "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
    "original_max_position_embeddings": 8192, "rope_type": "yarn",
}  # fmt: skip
OSS_YARN = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
    "truncate": False,
}  # fmt: skip
R1_YARN = {
    "attn_factor": 0.8782488562869419, "factor": 4.0, "original_max_position_embeddings": 32768, "rope_type": "yarn",
}  # fmt: skip
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1": ("llama", {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": LLAMA3}),
    "Llama 3.2 of Unsloth": ("llama", {"head_dim": 16, "rope_scaling": LLAMA3, "unsloth_fixed": True}),
    "Vicuna": ("llama", {"max_sequence_length": 2048, "pad_token_id": 0}),
    "SmolLM2": (
        "llama",
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
    ),
    "Falcon3": ("llama", {"activation": "swiglu", "attention_bias": False, "head_dim": 16, "mlp_bias": False}),
    "DeepSeek Coder": ("llama", {"rope_scaling": {"factor": 4.0, "type": "linear"}, "pretraining_tp": 1}),
    "a reward model": ("llama", {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1}),
    "Mistral 7B v0.1": ("mistral", {"sliding_window": 4096}),
    "Mistral Nemo": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "Qwen2.5": ("qwen2", QWEN),
    "Qwen2.5 with YaRN": (
        "qwen2",
        {**QWEN, "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}},
    ),
    "DeepSeek R1 Distill": ("qwen2", {**QWEN, "use_mrope": False}),
    "DeepSeek R1 0528 Distill": ("qwen3", {**QWEN, "attention_bias": False, "head_dim": 16, "rope_scaling": R1_YARN}),
    "Qwen3": ("qwen3", {**QWEN, "attention_bias": False, "head_dim": 16, "sliding_window": None}),
    "Qwen3 30B A3B": ("qwen3_moe", QWEN_EXPERTS),
    "Qwen3 Coder": (
        "qwen3_moe",
        {**QWEN_EXPERTS, "qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    ),
    "Gemma": ("gemma", {**GEMMA, "hidden_act": "gelu", "hidden_activation": None}),
    "Gemma 2": (
        "gemma2",
        {**GEMMA, **CAPS, "cache_implementation": "hybrid", "query_pre_attn_scalar": 16, "sliding_window": 4096},
    ),
    "Gemma 2 9B": (
        "gemma2",
        {**GEMMA, **CAPS, "query_pre_attn_scalar": 16, "sliding_window": 4096, "sliding_window_size": 4096},
    ),
    "Gemma 3 1B": (
        "gemma3_text",
        {
            **GEMMA, "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None,
            "query_pre_attn_scalar": 16, "rope_local_base_freq": 10000, "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
    ),
    "Gemma 3 270M": (
        "gemma3_text",
        {
            **GEMMA, "_sliding_window_pattern": 6, "layer_types": NEAR_AND_FAR, "rope_local_base_freq": 10000.0,
            "query_pre_attn_scalar": 16, "sliding_window": 512, "use_bidirectional_attention": False,
        },
    ),
    "Phi 3 mini 4k": ("phi3", {**PHI, "sliding_window": 2047}),
    "Phi 3 mini 128k": (
        "phi3",
        {**PHI, "rope_scaling": {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8, "type": "longrope"}},
    ),
    "Phi 4 mini": (
        "phi3",
        {
            **PHI, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
            "partial_rotary_factor": 0.75, "sliding_window": 262144,
            "rope_scaling": {"long_factor": [2.0] * 6, "short_factor": [1.0] * 6, "type": "longrope"},
        },
    ),
    "OLMo 2": ("olmo2", {"attention_bias": False}),
    "OLMo 3": ("olmo3", {"layer_types": NEAR_AND_FAR, "rope_scaling": OLMO3_YARN, "sliding_window": 4096}),
    "SmolLM3": (
        "smollm3",
        {
            "attention_bias": False, "layer_types": ["full_attention"] * 4, "max_window_layers": 28, "mlp_bias": False,
            "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "pretraining_tp": 2, "sliding_window": None,
            "use_sliding_window": False,
        },
    ),
    "Granite 3.3": (
        "granite",
        {
            "attention_bias": False, "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
            "logits_scaling": 16.0, "mlp_bias": False, "residual_multiplier": 0.22,
        },
    ),
    "GLM 4": ("glm4", {"attention_bias": False, "head_dim": 16, "partial_rotary_factor": 0.5}),
    "GLM 4 9B": ("glm", {"attention_bias": True, "head_dim": 16, "partial_rotary_factor": 0.5}),
    "Mixtral": ("mixtral", {**EXPERTS, "num_local_experts": 4, "router_jitter_noise": 0.0, "sliding_window": None}),
    "OLMoE": ("olmoe", {**EXPERTS, "clip_qkv": None, "norm_topk_prob": False, "num_experts": 4}),
    "gpt-oss in full precision": (
        "gpt_oss",
        {
            **EXPERTS, "attention_bias": True, "experts_per_token": 2, "head_dim": 16, "initial_context_length": 4096,
            "layer_types": NEAR_AND_FAR, "num_local_experts": 4, "rope_scaling": OSS_YARN, "sliding_window": 128,
            "swiglu_limit": 7.0,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(name: str, tmp_path: Path) -> None:
    """And so is what is written of them, here and by transformers."""
    model_type, settings = PUBLISHED[name]
    raw = {**ALL, "model_type": model_type, "architectures": [ARCHITECTURES[model_type].name], **settings}
    read = DecoderConfig.from_hf(raw)
    assert replace(DecoderConfig.from_hf(read.to_hf()), extras={}) == replace(read, extras={})
    assert "auto_map" not in read.to_hf(), "the code that it names is not beside what is saved"
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != "auto_map"}))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    written = DecoderConfig.from_hf({**theirs.to_dict(), "auto_map": raw.get("auto_map")})
    assert (written.windows, written.dense, written.rotary_dim) == (read.windows, read.dense, read.rotary_dim)
    assert written.rope_theta == read.rope_theta


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_all_that_transformers_says_of_a_layout_is_understood(model_type: str) -> None:
    config = transformers.AutoConfig.for_model(model_type)
    DecoderConfig.from_hf(config.to_dict())


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("llama", "mup_width", 64),
        ("llama", "parallel_blocks", True),
        ("llama", "num_nextn_predict_layers", 1),
        ("llama", "layer_norm_eps", 1e-3),
        ("llama", "attention_out_bias", True),
        ("llama", "sliding_window", 4),
        ("llama", "sliding_window_size", 4),
        ("gemma2", "sliding_window_size", 4),
        ("llama", "partial_rotary_factor", 0.5),
        ("gemma2", "partial_rotary_factor", 0.5),
        ("llama", "use_qk_norm", True),
        ("qwen3", "use_qk_norm", False),
        ("qwen2", "qkv_bias", False),
        ("llama", "no_rope_layers", [1, 0, 1, 0]),
        ("llama", "vision_config", {"depth": 3}),
        ("llama", "rope_interleaved", True),
        ("llama", "position_embedding_type", "alibi"),
        ("mistral", "attention_bias", True),
        ("qwen2", "mlp_bias", True),
        ("qwen2", "dual_chunk_attention_config", {"chunk_size": 262144}),
        ("qwen3_moe", "n_group", 2),
        ("qwen3_moe", "scoring_func", "sigmoid"),
        ("qwen3_moe", "routed_scaling_factor", 2.0),
        ("qwen3_moe", "shared_expert_intermediate_size", 32),
        ("qwen3_moe", "swiglu_limit", 7.0),
        ("mixtral", "moe_intermediate_size", 32),
        ("mixtral", "mlp_only_layers", [1]),
        ("olmoe", "decoder_sparse_step", 2),
        ("phi3", "full_attn_mod", 2),
        ("phi3", "lm_head_bias", True),
        ("gemma3_text", "attn_logit_softcapping", 30.0),
    ],
)
def test_a_setting_that_is_not_understood_is_named(model_type: str, field: str, value: Any) -> None:
    plain = {
        **transformers.AutoConfig.for_model(model_type).to_dict(),
        "num_hidden_layers": 4,
        "layer_types": None,
    }
    DecoderConfig.from_hf(plain)
    with pytest.raises(PanoplyError, match=rf"config\.json sets {field} to .*take it out") as raised:
        DecoderConfig.from_hf({**plain, field: value})
    assert "\n" not in str(raised.value)


def test_a_routing_that_a_layout_does_not_let_one_choose_is_named() -> None:
    raw = {**ALL, **EXPERTS, "model_type": "mixtral", "num_local_experts": 4, "decoder_sparse_step": 1}
    DecoderConfig.from_hf({**raw, "norm_topk_prob": True})
    with pytest.raises(PanoplyError, match="norm_topk_prob to false"):
        DecoderConfig.from_hf({**raw, "norm_topk_prob": False})


@pytest.mark.parametrize(
    ("model_type", "kinds", "sentence"),
    [
        ("qwen2", ["linear_attention"] * 4, "kind 'linear_attention' .layer_types., which are not known"),
        ("qwen2", ["full_attention"] * 3, "of 3 layers, not of 4"),
        ("llama", ["sliding_attention"] * 4, "kind 'sliding_attention' .layer_types., which are not known"),
        ("llama", ["chunked_attention"] * 4, "kind 'chunked_attention' .layer_types., which are not known"),
        ("mistral", NEAR_AND_FAR, "kind 'full_attention' .layer_types., which are not known"),
    ],
)
def test_kinds_of_layers_that_a_layout_does_not_have(
    model_type: str, kinds: list[str], sentence: str
) -> None:
    raw = {**ALL, "model_type": model_type, "layer_types": kinds}
    with pytest.raises(PanoplyError, match=sentence):
        DecoderConfig.from_hf(raw)


@pytest.mark.parametrize("group", ["rope_scaling", "rope_parameters"])
def test_settings_of_positions_that_are_not_understood_are_named(group: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    with pytest.raises(PanoplyError, match=rf"{group}\.mrope_section to a list of 3"):
        DecoderConfig.from_hf({**ALL, "model_type": "qwen2", group: rope})
    DecoderConfig.from_hf({**ALL, "model_type": "qwen2", group: {**rope, "mrope_section": None}})
    nested = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(PanoplyError, match=r"full_attention\.mrope_section"):
        DecoderConfig.from_hf({**ALL, **GEMMA, "model_type": "gemma3_text", "rope_parameters": nested})


def test_notes_of_libraries_are_kept(tmp_path: Path) -> None:
    model = Decoder(DecoderConfig(32, width=16, layers=1, heads=2))
    model.initialise(0)
    save_model(model, tmp_path / "model")
    raw = json.loads((tmp_path / "model/config.json").read_text())
    noted = {**raw, "unsloth_version": "2026.3.3", "neftune_noise_alpha": 5.0}
    (tmp_path / "model/config.json").write_text(json.dumps(noted))
    save_model(load_model(tmp_path / "model"), tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text()) == noted
    assert "mask_token_id" in understood(ARCHITECTURES["llama"])
