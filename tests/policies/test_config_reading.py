"""Values of a config that say a thing in an unusual way: transformers opens the same folder, and computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import panoply as pp
from panoply.errors import PanoplyError
from panoply.policies.build import slower
from panoply.policies.decoder import Decoder
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.folder import load_model, save_model
from panoply.policies.foreign import Foreign
from panoply.registry import find
from panoply.report.text import planned
from tests.own_model import tokenizer

AUTO: Any = transformers.AutoModelForCausalLM
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MANY = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FULL = {"layer_types": ["full_attention"] * 4, "sliding_window": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
NEAR = {"rope_type": "default", "rope_theta": 1e3}


def write(
    folder: Path, kind: str, settings: dict[str, Any], without: tuple[str, ...] = (), **beside: Any
) -> None:
    """A model of random weights, and its config less some settings and with others."""
    torch.manual_seed(0)
    model = AUTO.from_config(transformers.AutoConfig.for_model(kind, **{**SIZES, **settings}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(0.2 * torch.randn_like(weight))
            if "norm" in name and not kind.startswith("gemma"):
                weight.add_(1.0)
    model.tie_weights()
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw = {name: value for name, value in raw.items() if name not in without} | beside
    (folder / "config.json").write_text(json.dumps(raw))


def theirs(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    found: Any = AUTO.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    return found(tokens).logits


def agree(folder: Path, again: Path) -> Decoder | Foreign:
    """Our logits are transformers', and so are those of the folder that is saved of it; gives the model."""
    tokens = torch.randint(0, 61, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, model = theirs(folder, tokens), load_model(folder)
        torch.testing.assert_close(model(tokens), expected, atol=2e-5, rtol=2e-5)
        save_model(model, again)
        torch.testing.assert_close(theirs(again, tokens), expected, atol=2e-5, rtol=2e-5)
    return model


NATIVE: dict[str, tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "gemma2, no window": ("gemma2", FULL, (), {}),
    "gemma3, no window": ("gemma3_text", FULL, (), {}),
    "olmo3, no window": ("olmo3", FULL, (), {}),
    "gpt-oss, no window": ("gpt_oss", {**FULL, **EXPERTS}, (), {}),
    "gpt-oss, silent on positions": ("gpt_oss", EXPERTS, ("rope_parameters",), {}),
    "gpt-oss, a base alone": ("gpt_oss", EXPERTS, ("rope_parameters",), {"rope_theta": 150_000.0}),
    "gemma, old gelu": ("gemma", {}, (), {"hidden_act": "gelu"}),
    "gemma2, two names of gates": ("gemma2", {}, (), {"hidden_act": "silu"}),
    "phi3, two shares": ("phi3", {"partial_rotary_factor": 1.0}, (), {"partial_rotary_factor": 0.5}),
    "glm, three quarters": ("glm", {"rope_parameters": {**NEAR, "partial_rotary_factor": 0.75}}, (), {}),
    "llama, a share of 1": ("llama", {}, (), {"partial_rotary_factor": 1.0}),
    "llama, no epsilon": ("llama", {}, (), {"rms_norm_eps": 0.0}),
}


@pytest.mark.parametrize("case", NATIVE)
def test_what_runs_natively_is_what_transformers_computes(case: str, tmp_path: Path) -> None:
    kind, settings, without, beside = NATIVE[case]
    write(tmp_path / "model", kind, settings, without, **beside)
    assert isinstance(agree(tmp_path / "model", tmp_path / "again"), Decoder)


FOREIGN: dict[str, tuple[str, dict[str, Any], str]] = {
    "gates of experts": ("mixtral", {**EXPERTS, "hidden_act": "gelu_pytorch_tanh"}, "hidden_act=gelu_pytorch_tanh"),
    "gates of many": ("qwen3_moe", {**MANY, "hidden_act": "gelu"}, "hidden_act=gelu"),
    "gates": ("llama", {"hidden_act": "relu"}, "hidden_act=relu"),
    "exact gelu": ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation=gelu"),
    "clipped": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "clip_qkv": 0.5}, "clip_qkv=0.5"),
    "dynamic": ("llama", {"rope_parameters": {**NEAR, "rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
    "near positions": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": NEAR, "sliding_attention": YARN}},
        "sliding_attention.rope_type=yarn",
    ),
    "not truncated": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": {**YARN, "truncate": False}, "sliding_attention": NEAR}},
        "full_attention.truncate=false",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_what_only_transformers_computes_runs_through_it_and_is_told(case: str, tmp_path: Path) -> None:
    kind, settings, said = FOREIGN[case]
    write(tmp_path / "model", kind, settings)
    assert isinstance(agree(tmp_path / "model", tmp_path / "again"), Foreign)
    world = find("world", "chain").build()
    assert f"'{kind}' with {said} runs through transformers" in slower(str(tmp_path / "model"), world)
    with pytest.raises(PanoplyError, match="is not part of the"):
        DecoderConfig.from_hf(json.loads((tmp_path / "model/config.json").read_text()))


def test_a_plan_says_that_such_a_model_is_slower_and_few_bits_are_refused(tmp_path: Path) -> None:
    words = tokenizer()
    write(tmp_path / "model", "llama", {"hidden_act": "relu", "vocab_size": len(words)})
    words.save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n' * 40)
    (tmp_path / "reward.py").write_text(
        "def good(completions, **_):\n    return [1.0 for _ in completions]\n"
    )
    given = {"data": str(tmp_path / "data.jsonl"), "reward": f"{tmp_path / 'reward.py'}:good"}
    made = pp.plan("grpo", model=str(tmp_path / "model"), **given)
    assert "'llama' with hidden_act=relu runs through transformers" in planned(made)
    with pytest.raises(PanoplyError, match="runs through transformers"):
        pp.plan("grpo", model=str(tmp_path / "model"), lora=2, settings={"lora.base": "nf4"}, **given)


def test_a_config_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    raw = {**SIZES, "model_type": "smollm3", "sliding_window": 5, "use_sliding_window": False}
    assert not any(DecoderConfig.from_hf(raw).windows)
    with pytest.raises(PanoplyError, match=r"no layer has a window .use_sliding_window."):
        DecoderConfig.from_hf({**raw, "layer_types": ["sliding_attention", "full_attention"] * 2})


@pytest.mark.parametrize("group", ["rope_scaling", "rope_parameters"])
def test_a_share_of_heads_that_a_layout_does_not_read_is_named(group: str) -> None:
    raw = {**SIZES, "model_type": "qwen3", group: {"rope_type": "default", "partial_rotary_factor": 0.5}}
    with pytest.raises(PanoplyError, match=rf"{group}\.partial_rotary_factor to 0.5"):
        DecoderConfig.from_hf(raw)


def test_a_base_or_a_factor_that_is_null_or_0_is_as_good_as_none() -> None:
    raw = {**SIZES, "model_type": "qwen3", "rope_theta": 500.0, "rope_parameters": {"rope_theta": None}}
    assert DecoderConfig.from_hf(raw).rope_theta == 500.0
    del raw["rope_theta"]
    assert DecoderConfig.from_hf(raw).rope_theta == 10_000.0
    raw["rope_parameters"] = YARN
    plain = DecoderConfig.from_hf(raw).frequencies()[0][1]
    raw["rope_parameters"] = {**YARN, "mscale": 0.7, "mscale_all_dim": 0}
    assert DecoderConfig.from_hf(raw).frequencies()[0][1] == plain


@pytest.mark.parametrize("kind", ["gemma3_text", "olmo3"])
def test_settings_of_positions_that_nobody_would_look_at_are_refused(kind: str) -> None:
    raw, linear = {**SIZES, "model_type": kind}, {"rope_type": "linear", "factor": 8.0}
    with pytest.raises(PanoplyError, match="of each kind of layer under rope_scaling"):
        DecoderConfig.from_hf({**raw, "rope_scaling": {"full_attention": linear}})
    with pytest.raises(PanoplyError, match="of all layers under rope_parameters"):
        DecoderConfig.from_hf({**raw, "rope_parameters": linear})
    both = {**linear, "full_attention": linear, "sliding_attention": NEAR}
    assert DecoderConfig.from_hf({**raw, "rope_parameters": both}).rope_type == "linear"


PAIRS = torch.linspace(1.0, 7.3, 32).tolist()
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 5.7},
    "llama3": {"factor": 5.7, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 5.7, "attention_factor": 1.1},
    "longrope": {"short_factor": PAIRS, "long_factor": PAIRS, "factor": 5.7},
}


@pytest.mark.parametrize("original", [4096, 5])
@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_are_those_of_transformers_to_the_last_bit(kind: str, original: int) -> None:
    """Each bit more that they differ by is as far off as sequences are long."""
    rope = {
        "rope_type": kind,
        "rope_theta": 3e5,
        "original_max_position_embeddings": original,
        **SCALINGS[kind],
    }
    raw = {**SIZES, "head_dim": 64, "max_position_embeddings": 131072, "rope_parameters": rope}
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**raw))
    ((ours, factor),) = DecoderConfig.from_hf({**raw, "model_type": "llama"}).frequencies()
    assert torch.equal(ours, theirs.inv_freq)
    assert factor == theirs.attention_scaling
