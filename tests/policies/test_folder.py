"""Model folders: shards, replacement as a whole, and every way a folder can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from panoply.errors import PanoplyError
from panoply.policies.decoder import Decoder, DecoderConfig
from panoply.policies.folder import load_model, save_model

CONFIG = DecoderConfig(20, width=16, layers=2, heads=2)
TOKENS = torch.tensor([[1, 5, 7, 19, 2]])


@pytest.fixture
def model() -> Decoder:
    decoder = Decoder(CONFIG)
    decoder.initialise(3)
    return decoder


@pytest.fixture
def folder(model: Decoder, tmp_path: Path) -> Path:
    save_model(model, tmp_path / "m")
    return tmp_path / "m"


def test_shards_hold_the_same_model(model: Decoder, tmp_path: Path) -> None:
    import transformers

    save_model(model, tmp_path / "m", shard_bytes=4000)
    names = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert torch.equal(load_model(tmp_path / "m")(TOKENS), model(TOKENS))
    reopened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    torch.testing.assert_close(reopened(TOKENS).logits, model(TOKENS), atol=1e-5, rtol=1e-5)


def test_a_tied_head_stays_one_parameter(tmp_path: Path) -> None:
    config = DecoderConfig(20, width=16, layers=1, heads=2, tied=True)
    save_model(Decoder(config), tmp_path / "m")
    assert "lm_head.weight" not in load_file(tmp_path / "m" / "model.safetensors")
    again = load_model(tmp_path / "m")
    assert isinstance(again, Decoder)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert all(p.requires_grad for p in again.parameters())


def test_a_tied_head_may_be_saved_in_the_embedding_s_place_or_beside_it(tmp_path: Path) -> None:
    """But one that differs says that they are not tied: transformers 5 goes by the weights, others by the config."""
    model = Decoder(DecoderConfig(20, width=16, layers=1, heads=2, tied=True))
    save_model(model, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    weights = load_file(file)
    embedding = weights.pop("model.embed_tokens.weight")
    for saved in (
        {"lm_head.weight": embedding},
        {"lm_head.weight": embedding.clone(), "model.embed_tokens.weight": embedding},
    ):
        save_file({**weights, **saved}, file)
        assert torch.equal(load_model(tmp_path / "m")(TOKENS), model(TOKENS))
    save_file({**weights, "lm_head.weight": embedding + 1, "model.embed_tokens.weight": embedding}, file)
    with pytest.raises(
        PanoplyError, match=r"head that differs from the embedding.*tie_word_embeddings.*false"
    ):
        load_model(tmp_path / "m")


def test_replacing_a_model_drops_its_shards_and_keeps_the_rest(model: Decoder, tmp_path: Path) -> None:
    save_model(model, tmp_path / "m", shard_bytes=4000, files_beside={"generation_config.json": b"{}"})
    (tmp_path / "m" / "notes.txt").write_text("mine")
    save_model(model, tmp_path / "m")
    kept = {"config.json", "generation_config.json", "model.safetensors", "notes.txt"}
    assert {p.name for p in (tmp_path / "m").iterdir()} == kept
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_failed_save_leaves_the_old_model(
    model: Decoder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    before = model(TOKENS)
    monkeypatch.setattr("panoply.policies.folder.save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_model(Decoder(CONFIG), folder)
    assert torch.equal(load_model(folder)(TOKENS), before)
    assert [p.name for p in folder.parent.iterdir()] == ["m"]


def test_a_folder_of_other_things_is_not_replaced(model: Decoder, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(PanoplyError, match="holds other files and no model"):
        save_model(model, tmp_path)


def test_what_the_folder_knew_beside_the_shape_is_kept(folder: Path, tmp_path: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "eos_token_id": 7, "unsloth_fixed": True}))
    save_model(load_model(folder), tmp_path / "again")
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["eos_token_id"] == 7
    assert again["unsloth_fixed"] is True


def spoil(folder: Path, how: str) -> None:
    weights = load_file(folder / "model.safetensors")
    file = folder / "model.safetensors"
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "garbage":
        file.write_bytes(b"not a model")
    elif how == "pickle":
        file.rename(folder / "pytorch_model.bin")
    elif how == "none":
        file.unlink()
    elif how == "missing":
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, file)
    elif how == "surplus":
        save_file({**weights, "model.layers.7.mlp.up_proj.weight": torch.zeros(2)}, file)
    elif how == "shape":
        save_file({**weights, "model.norm.weight": torch.zeros(8)}, file)
    elif how in ("nan", "inf"):
        weights["model.layers.0.mlp.up_proj.weight"][3, 4] = float(how)
        save_file(weights, file)
    elif how == "eight bits":
        save_file({**weights, "model.norm.weight": torch.ones(16, dtype=torch.int8)}, file)
    elif how == "elsewhere":
        index = {"weight_map": {"model.norm.weight": "../other.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "index":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": 3}}')
    elif how == "config":
        (folder / "config.json").write_text("{")
    elif how == "no config":
        (folder / "config.json").unlink()
    elif how == "shard":
        index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", "corrupt or cut short"),
        ("garbage", "corrupt or cut short"),
        ("pickle", "never opened"),
        ("none", "holds no weights"),
        ("missing", "lack model.layers.1.mlp.up_proj.weight"),
        ("surplus", "hold model.layers.7.mlp.up_proj.weight"),
        ("shape", r"model.norm.weight is \(8,\), not \(16,\)"),
        ("nan", "are not finite: model.layers.0.mlp.up_proj.weight holds nan"),
        ("inf", "are not finite: model.layers.0.mlp.up_proj.weight holds inf"),
        ("eight bits", "model.norm.weight in .* is of torch.int8"),
        ("elsewhere", "names '../other.safetensors', which is not in its folder"),
        ("index", r"weight_map\.model\.norm\.weight is text, not 3"),
        ("config", "not valid JSON"),
        ("no config", "no config.json"),
        ("shard", "lacks the shard model-00001-of-00002.safetensors"),
    ],
)
def test_a_wrong_folder_is_named_in_a_sentence(folder: Path, how: str, message: str) -> None:
    spoil(folder, how)
    with pytest.raises(PanoplyError, match=message) as raised:
        load_model(folder)
    assert "\n" not in str(raised.value)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(PanoplyError, match="There is no folder"):
        load_model("nowhere/at/all")


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("num_attention_heads", [2], "num_attention_heads is a whole number, not a list of 1"),
        ("num_attention_heads", 0, "num_attention_heads is from 1 to 65,536, not 0"),
        ("num_attention_heads", None, "num_attention_heads is a whole number, not null"),
        ("num_attention_heads", 2.5, "num_attention_heads is a whole number, not 2.5"),
        ("num_attention_heads", 999, "999 heads cannot share 2"),
        ("num_key_value_heads", -1, "num_key_value_heads is from 1"),
        ("hidden_size", "16", "hidden_size is a whole number, not '16'"),
        ("hidden_size", 10**12, "hidden_size is from 1 to"),
        ("num_hidden_layers", 10**9, "num_hidden_layers is from 1 to 1,000"),
        ("vocab_size", True, "vocab_size is a whole number, not true"),
        ("head_dim", 0.5, "head_dim is a whole number or null, not 0.5"),
        ("rope_scaling", 3, "rope_scaling is an object or null, not 3"),
        ("rope_scaling", {"rope_type": ["yarn"]}, r"rope_scaling\.rope_type is text or null"),
        ("rope_scaling", {"rope_type": "yarn"}, "'yarn' needs 'factor'"),
        ("rope_scaling", {"rope_type": "linear", "factor": None}, "'linear' needs factor"),
        (
            "rope_scaling",
            {"rope_type": "linear", "factor": 0},
            r"rope_scaling\.factor is from 0\.001 to .*, not 0",
        ),
        (
            "rope_scaling",
            {"rope_type": "linear", "factor": 1e-320},
            r"rope_scaling\.factor is from 0\.001 to",
        ),
        ("rope_scaling", {"rope_theta": 1.0}, r"rope_scaling\.rope_theta is from 1\.001 to"),
        ("rope_scaling", {"full_attention": {"factor": -1}}, r"rope_scaling\.full_attention\.factor is from"),
        (
            "rope_scaling",
            {"rope_type": "longrope", "short_factor": [1.0, 0.0], "long_factor": [2.0] * 4},
            r"rope_scaling\.short_factor is from 0\.001",
        ),
        ("original_max_position_embeddings", -1, "original_max_position_embeddings is from 2 to"),
        ("rope_theta", -5, "rope_theta is from 1.001"),
        ("rope_theta", float("inf"), "rope_theta is a finite number or null, not inf"),
        ("rms_norm_eps", "tiny", "rms_norm_eps is a finite number or null"),
        ("layer_types", "full", "layer_types is a list"),
        ("tie_word_embeddings", "no", "tie_word_embeddings is true or false or null"),
        ("hidden_act", {}, "hidden_act is text or null"),
        ("model_type", 7, "model_type is text, not 7"),
        ("model_type", None, "model_type is text, not null"),
        ("architectures", 5, "architectures is a list or null, not 5"),
    ],
)
def test_a_config_of_wrong_types_and_sizes(folder: Path, field: str, value: object, sentence: str) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("rope_parameters")
    (folder / "config.json").write_text(json.dumps({**raw, field: value}))
    with pytest.raises(PanoplyError, match=sentence) as raised:
        load_model(folder)
    assert "\n" not in str(raised.value)


def test_a_config_nested_without_end(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(PanoplyError, match="nested too deep"):
        load_model(folder)
