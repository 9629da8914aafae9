"""Models that read pictures, too: their language model alone, against transformers, or one true sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import own_model
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import panoply as pp
from panoply.errors import PanoplyError
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.folder import load_model
from panoply.policies.text_part import language_config
from panoply.report.text import planned

MODELS: Any = transformers
WORDS = own_model.tokenizer()
TEXT = {
    "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None,
    "eos_token_id": WORDS.eos_token_id, "pad_token_id": None,
}  # fmt: skip
EYES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
WHOLES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {"model_type": "gemma3_text", "head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 9},
        {"mm_tokens_per_image": 4, "image_token_index": 5},
    ),
    "mistral3": ("Mistral3", {"model_type": "mistral", "sliding_window": 6}, {"image_token_index": 5}),
    "mistral3-untied": ("Mistral3", {"model_type": "mistral"}, {"tie_word_embeddings": False}),
    "llava": ("Llava", {"model_type": "llama"}, {"image_token_index": 5}),
}


def whole(name: str, folder: Path) -> Any:
    kind, text, settings = WHOLES[name]
    torch.manual_seed(0)
    eyes = {
        **EYES,
        "model_type": {"Mistral3": "pixtral", "Llava": "clip_vision_model"}.get(kind, "siglip_vision_model"),
    }
    config = getattr(MODELS, f"{kind}Config")(text_config={**TEXT, **text}, vision_config=eyes, **settings)
    model = getattr(MODELS, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    WORDS.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", WHOLES)
def test_the_language_model_alone_reads_as_it_does_in_the_whole(name: str, tmp_path: Path) -> None:
    """And what is saved of it stands alone, here and in transformers."""
    tokens = torch.randint(0, 250, (2, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = whole(name, tmp_path / "whole")(input_ids=tokens).logits
        policy: Any = pp.load_policy(tmp_path / "whole")
        torch.testing.assert_close(policy.model(tokens), expected, atol=1e-5, rtol=1e-5)
        policy.save(tmp_path / "alone")
        theirs, report = MODELS.AutoModelForCausalLM.from_pretrained(
            tmp_path / "alone", output_loading_info=True
        )
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        torch.testing.assert_close(theirs.eval()(tokens).logits, expected, atol=1e-5, rtol=1e-5)
        again: Any = pp.load_policy(tmp_path / "alone")
        assert torch.equal(again.model(tokens), policy.model(tokens))
    written = json.loads((tmp_path / "alone/config.json").read_text())
    assert written["eos_token_id"] == WORDS.eos_token_id
    assert not any(name.endswith("_config") for name in written)


def test_weights_named_as_in_memory_are_found(tmp_path: Path) -> None:
    """`model.language_model.`, as some releases and trainers of others save them."""
    whole("gemma3", tmp_path)
    tokens = torch.arange(20)[None]
    before = load_model(tmp_path)(tokens)
    file = tmp_path / "model.safetensors"
    renamed = {
        "model." + name.replace("language_model.model.", "language_model."): weight
        for name, weight in load_file(file).items()
    }
    save_file(renamed, file, metadata={"format": "pt"})
    assert torch.equal(load_model(tmp_path)(tokens), before)
    save_file({**renamed, "model.language_model.ears": torch.zeros(2)}, file, metadata={"format": "pt"})
    with pytest.raises(PanoplyError, match=r"hold model\.ears, unknown to its config\.json"):
        load_model(tmp_path)


def test_sizes_that_gemma_leaves_out_are_known() -> None:
    """The `text_config` of Gemma 3 4B, as it is published."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
        "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "boi_token_index": 255999, "mm_tokens_per_image": 256,
    }  # fmt: skip
    read = language_config(raw, Path("gemma"))
    meant = MODELS.Gemma3Config(**{k: v for k, v in raw.items() if k != "model_type"}).text_config
    for name in ("vocab_size", "num_attention_heads"):
        assert read[name] == getattr(meant, name)
    assert read["eos_token_id"] == [1, 106]
    config = DecoderConfig.from_hf(read)
    assert (config.kv_heads, config.head_dim) == (meant.num_key_value_heads, meant.head_dim)


def test_a_plan_says_what_is_trained_and_adapters_are_refused(tmp_path: Path) -> None:
    whole("gemma3", tmp_path / "whole")
    (tmp_path / "data.jsonl").write_text('{"prompt": "Q", "completion": "A"}\n' * 8)
    own = {"data": str(tmp_path / "data.jsonl"), "model": str(tmp_path / "whole")}
    said = " ".join(planned(pp.plan("sft", **own)).split())
    assert "Of the gemma3 the language model alone is trained and saved" in said
    alone = sum(weight.numel() for weight in load_model(tmp_path / "whole").parameters())
    assert f"{alone:,}" in said
    with pytest.raises(PanoplyError, match=r"save its language model first, panoply\.load_policy\("):
        pp.plan("sft", **own, lora=2)


def test_other_models_that_read_more_than_text_are_refused_in_a_sentence(tmp_path: Path) -> None:
    configs: dict[str, dict[str, Any]] = {
        "llama4": {"text_config": {"model_type": "llama4_text"}, "vision_config": {}},
        "qwen2_vl": {"vision_config": {"depth": 1}, "hidden_size": 64},
        "paligemma": {"text_config": {"model_type": "gemma"}, "vision_config": {}},
        "internvl_chat": {"llm_config": {"model_type": "qwen2"}},
    }
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    for kind, parts in configs.items():
        architectures = [f"{kind}ForConditionalGeneration"]
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": kind, "architectures": architectures, **parts})
        )
        with pytest.raises(PanoplyError, match=f"is a {kind}, which reads more than text") as raised:
            load_model(tmp_path)
        assert "\n" not in str(raised.value)
        with pytest.raises(PanoplyError, match=f"is a {kind}"):
            pp.plan("grpo", "chain", model=str(tmp_path))
