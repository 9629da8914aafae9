"""The decoder against transformers, with and without a cache, and under PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import panoply as pp
from panoply.errors import PanoplyError
from panoply.policies.architectures import ARCHITECTURES
from panoply.policies.attention import Cache
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.expert_files import from_disk
from panoply.policies.experts import Mixing
from panoply.policies.folder import load_model, save_model
from panoply.policies.packing import pack
from panoply.policies.text import TextPolicy
from panoply.registry import find
from panoply.report.text import planned

AUTO: Any = transformers.AutoModelForCausalLM
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
LOCAL = ["sliding_attention", "full_attention", "sliding_attention"]
EMPTY = {"pad_token_id": None, "eos_token_id": None}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
PARTIAL = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0], "long_factor": [3.0, 4.0, 5.0], "original_max_position_embeddings": 32,
}  # fmt: skip
QUARTER = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
TWO_BASES = {
    "full_attention": LINEAR,
    "sliding_attention": {"rope_type": "default", "rope_theta": 40.0},
}
TWO_SCALES = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 5.0,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
OSS = {
    "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 6, "swiglu_limit": 0.5,
    "rope_parameters": {**YARN, "truncate": False},
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 6}),
    "mistral": ("mistral", {"sliding_window": None}),
    "gemma": ("gemma", {"head_dim": 12}),
    "gemma2": ("gemma2", {"head_dim": 12, "sliding_window": 5, **CAPS, "query_pre_attn_scalar": 9}),
    "gemma2-untied": ("gemma2", {"head_dim": 8, "tie_word_embeddings": False, "attention_bias": True}),
    "gemma3": ("gemma3_text", {"head_dim": 12, "sliding_window": 5, "layer_types": LOCAL}),
    "gemma3-capped": (
        "gemma3_text",
        {"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 3.0, "rope_parameters": TWO_BASES},
    ),
    "phi3": ("phi3", EMPTY),
    "phi3-partial": ("phi3", {**EMPTY, "rope_parameters": PARTIAL, "sliding_window": 6}),
    "phi3-longrope": (
        "phi3",
        {
            **EMPTY,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 32,
            "rope_parameters": LONGROPE,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "olmo3": ("olmo3", {"sliding_window": 5, "layer_types": LOCAL, "rope_parameters": TWO_SCALES}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, **EMPTY}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 5, **EMPTY},
    ),
    "granite": ("granite", {**GRANITE, **EMPTY}),
    "granite-biases": ("granite", {**GRANITE, **EMPTY, "attention_bias": True, "mlp_bias": True}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1], "head_dim": 12}),
    "qwen3-moe-free": ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2, "attention_bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "sliding_window": 6}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, **EMPTY}),
    "olmoe-normed": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, **EMPTY}),
    "gpt-oss": ("gpt_oss", {**OSS, **EMPTY}),
    "gpt-oss-plain": ("gpt_oss", {**OSS, "head_dim": 12, "attention_bias": False, "rope_parameters": LINEAR}),
    "glm": ("glm", {"head_dim": 16, **EMPTY}),
    "glm4": ("glm4", {"head_dim": 16, **EMPTY}),
    "glm4-quarter": ("glm4", {"head_dim": 8, "attention_bias": False, "rope_parameters": QUARTER, **EMPTY}),
}

SPARSE = ["qwen3-moe", "mixtral", "olmoe", "gpt-oss"]


def theirs(name: str) -> Any:
    """A random transformers model whose biases and norms are not at their bland initial values."""
    model_type, settings = MODELS[name]
    size = {"vocab_size": 53, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**size, **heads, **settings})
    model = AUTO.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def ours(model: Any) -> Decoder:
    decoder = Decoder(DecoderConfig.from_hf(model.config.to_dict()))
    decoder.load_state_dict(as_ours(model.state_dict(), decoder))
    return decoder


def as_ours(weights: Mapping[str, torch.Tensor], decoder: Decoder) -> dict[str, torch.Tensor]:
    """Weights, or their slopes, that transformers has in memory, as the decoder has them."""
    named = {name.replace(".mlp.gate.", ".mlp.router."): w for name, w in weights.items()}
    sparse = decoder.config.layout.sparse
    return named if sparse is None or sparse.each else from_disk(named, sparse, 0)


def sequences(length: int = 21) -> torch.Tensor:
    return torch.randint(0, 53, (3, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_hidden_states_are_those_of_transformers(name: str) -> None:
    model, tokens = theirs(name), sequences()
    decoder = ours(model)
    expected = model(tokens, output_hidden_states=True)
    torch.testing.assert_close(decoder(tokens), expected.logits, atol=1e-5, rtol=1e-5)
    positions = torch.arange(21).expand(3, 21)
    _, tapped = decoder.hidden_states(tokens, positions, taps=[0, 2, 3])
    tapped[3] = (
        tapped[3] * decoder.config.logit_divisor
    )  # which is taken out of the states, not of the logits
    for depth, state in tapped.items():
        torch.testing.assert_close(state, expected.hidden_states[depth], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_folder_opens_in_transformers_and_here(name: str, tmp_path: Path) -> None:
    decoder, tokens = ours(theirs(name)), sequences()
    save_model(decoder, tmp_path / "model")
    reopened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(reopened(tokens).logits, decoder(tokens), atol=1e-5, rtol=1e-5)
    again = load_model(tmp_path / "model")
    assert isinstance(again, Decoder)
    assert torch.equal(again(tokens), decoder(tokens))
    assert again.config.windows == decoder.config.windows


FAMILIES = [
    "gemma",
    "gemma2",
    "gemma3",
    "phi3-partial",
    "olmo2",
    "olmo3",
    "smollm3-window",
    "granite",
    "glm",
    "glm4",
    *SPARSE,
]


@pytest.mark.parametrize("name", ["llama-rope3", "qwen2-window", "qwen3", "mistral-window", *FAMILIES])
def test_a_folder_saved_by_transformers_opens_here(name: str, tmp_path: Path) -> None:
    model, tokens = theirs(name), sequences()
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(load_model(tmp_path)(tokens), model(tokens).logits, atol=1e-5, rtol=1e-5)


def test_rope_settings_are_read_in_the_older_spelling() -> None:
    raw = theirs("llama-rope3").config.to_dict()
    rope = dict(raw.pop("rope_parameters"))
    older = {**raw, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    new = DecoderConfig.from_hf(theirs("llama-rope3").config.to_dict())
    assert torch.equal(DecoderConfig.from_hf(older).frequencies()[0][0], new.frequencies()[0][0])
    older["rope_scaling"] = {"type": "linear", "factor": 4.0}
    assert DecoderConfig.from_hf(older).rope_type == "linear"


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral-window", "qwen2-window", *FAMILIES])
def test_decoding_with_a_cache_is_the_full_forward(name: str) -> None:
    decoder, tokens = ours(theirs(name)), sequences()
    full = decoder(tokens)
    cache: Cache = decoder.new_cache(3, 32)
    with torch.no_grad():
        for part in torch.arange(21).expand(3, 21).split_with_sizes([7, 1, 12, 1], dim=1):
            cache.begin(part)
            logits = decoder.logits(decoder.hidden(tokens.gather(1, part), part, cache=cache))
            torch.testing.assert_close(
                logits, full.gather(1, part[..., None].expand(-1, -1, 53)), atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("name", ["llama", *FAMILIES])
def test_gradients_in_float64_are_those_of_transformers(name: str) -> None:
    """Of all weights under the names they have there, through prompts that are packed and shared, and without."""
    model = theirs(name).double()
    if name in SPARSE:
        model.set_experts_implementation(
            "eager"
        )  # its kernels know no float64; an auxiliary loss is in neither
    decoder, tokens = ours(model).double(), sequences(12)[:2]
    tokens[:, :5] = tokens[0, :5]
    weight = torch.randn(2, 12, 53, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    right = as_ours(slopes(model, (model(tokens).logits * weight).sum()), decoder)

    def packed() -> torch.Tensor:
        """The prefix once, then what differs of both rows."""
        length, segment, row = (
            torch.tensor([5, 7, 7]),
            torch.tensor([0, 1, 2]),
            torch.zeros(3, dtype=torch.long),
        )
        flat = torch.cat([tokens[0, :5], tokens[0, 5:], tokens[1, 5:]])[None]
        positions = torch.cat([torch.arange(12), torch.arange(5, 12)])[None]
        hidden, _ = decoder.hidden_states(flat, positions, packing=pack(length, segment, row))
        logits = decoder.logits(hidden)[0]
        return torch.stack([logits[:12], torch.cat([logits[:5], logits[12:]])])

    for logits in (decoder(tokens), packed()):
        for parameter, slope in slopes(decoder, (logits * weight).sum()).items():
            # Frequencies and what transformers keeps of norms and softmaxes are float32's.
            apart = (slope - right[parameter]).norm() / right[parameter].norm()
            assert apart < 2e-6, f"{parameter}: {apart}"


def slopes(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    learning = dict(model.named_parameters())
    return dict(
        zip(learning, torch.autograd.grad(loss, list(learning.values()), retain_graph=True), strict=True)
    )


def test_cached_rows_may_stand_at_different_positions() -> None:
    decoder, tokens = ours(theirs("mistral-window")), sequences()
    full, lengths = decoder(tokens), torch.tensor([4, 11, 7])
    cache: Cache = decoder.new_cache(3, 32)
    prompt = torch.arange(11).expand(3, 11)
    with torch.no_grad():
        cache.begin(prompt)
        decoder.hidden(tokens[:, :11], prompt, cache=cache)
        for step in range(3):
            at = (lengths + step)[:, None]
            cache.begin(at)
            logits = decoder.logits(decoder.hidden(tokens.gather(1, at), at, cache=cache))[:, 0]
            expected = full[torch.arange(3), at[:, 0]]
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_positions_stay_exact_in_half_precision() -> None:
    config = DecoderConfig(20, width=32, layers=1, heads=2)
    positions = torch.tensor([[1021]])
    exact = Decoder(config).rotations(positions, torch.float32)[0][0]
    rounded = Decoder(config).to(torch.bfloat16).rotations(positions, torch.bfloat16)[0][0]
    torch.testing.assert_close(rounded, exact.to(torch.bfloat16), atol=0, rtol=0)


def test_padding_gives_no_nan_and_leaves_the_rest_alone() -> None:
    decoder, tokens = ours(theirs("llama")), sequences(6)
    segments = torch.tensor([[0, 0, 1, 2, 2, -1]] * 3)
    positions = torch.tensor([[0, 1, 2, 2, 3, 0]] * 3)
    states = decoder.hidden(tokens, positions, segments)
    assert states.isfinite().all()
    without = decoder.hidden(tokens[:, :5], positions[:, :5], segments[:, :5])
    torch.testing.assert_close(states[:, :5], without, atol=1e-6, rtol=1e-6)


def test_adapters_of_peft_load_both_ways(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    tokens, model = sequences(), theirs("qwen2")
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    mine = peft.get_peft_model(ours(model), peft.LoraConfig(**lora))
    assert not torch.allclose(mine(tokens), ours(model)(tokens))
    mine.save_pretrained(tmp_path / "mine")
    loaded = peft.PeftModel.from_pretrained(ours(model), tmp_path / "mine")
    assert torch.equal(loaded(tokens), mine(tokens))
    positions = torch.arange(21).expand(3, 21)
    assert torch.equal(loaded.logits(loaded.hidden(tokens, positions)), mine(tokens))

    other = peft.get_peft_model(theirs("qwen2"), peft.LoraConfig(task_type="CAUSAL_LM", **lora)).eval()
    other.save_pretrained(tmp_path / "other")
    loaded = peft.PeftModel.from_pretrained(ours(model), tmp_path / "other")
    expected = other(tokens).logits
    torch.testing.assert_close(loaded.base_model.model(tokens), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type=dynamic is not part"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not part of the llama layout"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"model_type": "mamba"}, "no layout 'mamba'"),
    ],
)
def test_what_the_decoder_cannot_do_it_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PanoplyError, match=message):
        DecoderConfig.from_hf({**theirs("llama").config.to_dict(), **change})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gemma3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping to 30.0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("llama", {"residual_multiplier": 0.5}, "residual_multiplier"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}},
            "rope_type=dynamic",
        ),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation=gelu"),
        ("glm4", {"hidden_act": "relu"}, "hidden_act=relu"),
        ("qwen3-moe", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act=gelu_pytorch_tanh"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "sliding_attention.rope_type=yarn",
        ),
        ("gemma2", {"rope_parameters": TWO_BASES}, "for each kind of layer"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers of config.json is of 1 layers"),
        ("glm4", {"rope_parameters": {"partial_rotary_factor": 0.2}}, "cannot be turned in pairs"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling is from"),
        ("qwen3-moe", {"router_bias": True}, "router_bias"),
        ("qwen3-moe", {"n_shared_experts": 1}, "n_shared_experts"),
        ("qwen3-moe", {"num_experts_per_tok": 7}, "cannot go through 7 of 6 experts"),
        ("qwen3-moe", {"num_experts_per_tok": 0}, "cannot go through 0 of 6 experts"),
        ("mixtral", {"num_local_experts": 0}, "cannot go through 2 of 0 experts"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, "dequantize=True"),
        ("gpt-oss", {"swiglu_limit": 0.0}, "swiglu_limit is from"),
        ("llama", {"num_local_experts": 4}, "num_local_experts"),
    ],
)
def test_fields_that_a_layout_does_not_have_are_refused_by_name(
    name: str, change: dict[str, Any], message: str
) -> None:
    raw = {**theirs(name).config.to_dict(), **change}
    with pytest.raises(PanoplyError, match=message):
        DecoderConfig.from_hf(raw)


@pytest.mark.parametrize("layout", ARCHITECTURES)
def test_a_config_made_by_hand_is_read_as_it_was_written(layout: str) -> None:
    windowed = (3, 0) if ARCHITECTURES[layout].windows == "layers" else ()
    local = 50.0 if ARCHITECTURES[layout].local_theta else 0.0
    sparse, mixing = ARCHITECTURES[layout].sparse, None
    if sparse is not None:
        clamp = {"bias": True, "alpha": 1.5, "limit": 3.0} if sparse.clamped else {}
        mixing = Mixing(6, 2, 10, **clamp)
    made = DecoderConfig(
        20, 16, 2, 2, model_type=layout, windows=windowed, local_theta=local, norm_eps=1e-4, mixing=mixing,
        dense=(1,) if layout == "qwen3_moe" else (),
    )  # fmt: skip
    read = DecoderConfig.from_hf(made.to_hf())
    assert replace(read, extras={}, query_scalar=0.0, attention_scale=0.0) == made
    assert read.score_scale == made.score_scale


@pytest.mark.parametrize("layout", ["gemma3_text", "olmo3"])
def test_layers_with_a_window_are_not_scaled_whatever_their_base(layout: str) -> None:
    made = DecoderConfig(
        20, 16, 2, 2, model_type=layout, windows=(3, 0), rope_theta=500.0, rope_scaling=LINEAR
    )
    near, far = (f for f, _ in made.frequencies())
    torch.testing.assert_close(near, 2 * far)
    for ours, read in zip((near, far), DecoderConfig.from_hf(made.to_hf()).frequencies(), strict=True):
        assert torch.equal(ours, read[0])


@pytest.mark.parametrize(("layout", "bias"), [("phi3", "attention_bias"), ("qwen2", "mlp_bias")])
def test_biases_that_a_layout_does_not_have_are_refused(layout: str, bias: str) -> None:
    with pytest.raises(PanoplyError, match=f"The {layout} layout has no {bias}"):
        DecoderConfig(20, 16, 2, 2, model_type=layout, **{bias: True})


def test_plan_says_that_a_layout_runs_natively(tmp_path: Path) -> None:
    world = find("world", "chain").build()
    policy = TextPolicy.fresh(
        DecoderConfig(**{**world.default_model(), "model_type": "gemma2"}), world.tokenizer
    )
    policy.save(tmp_path / "model")
    made = pp.plan("grpo", "chain", model=str(tmp_path / "model"))
    assert "'gemma2' runs natively" in planned(made)


def test_positions_end_where_other_factors_begin() -> None:
    raw = theirs("phi3-longrope").config.to_dict()
    config = DecoderConfig.from_hf(raw)
    assert config.max_positions == 32
    assert config.to_hf()["max_position_embeddings"] == 128
    bad = {**raw["rope_parameters"], "short_factor": [1.0]}
    with pytest.raises(PanoplyError, match="1 short factors for 3 pairs"):
        DecoderConfig.from_hf({**raw, "rope_parameters": bad}).frequencies()


def test_initial_weights_depend_on_the_seed_only() -> None:
    decoders = [Decoder(DecoderConfig(20, width=16, layers=1, heads=2)) for _ in range(3)]
    for decoder, seed in zip(decoders, [1, 1, 2], strict=True):
        torch.randn(3)
        decoder.initialise(seed)
    first, same, other = (d.model.layers[0].self_attn.q_proj.weight for d in decoders)  # type: ignore[union-attr]
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
