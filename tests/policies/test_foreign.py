"""Other architectures behind the decoder's interface, against transformers itself."""

from __future__ import annotations

import copy
import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from panoply.errors import PanoplyError
from panoply.policies.folder import load_model, save_model
from panoply.policies.foreign import Foreign, ForeignConfig
from panoply.policies.foreign_attention import Asked, Routed, attention, looking
from panoply.policies.packing import pack
from panoply.rollout import graphs
from panoply.rollout.engine import Request, Sampling, TextEngine
from panoply.rollout.plain_graphs import PlainGraphDecoder

AUTO: Any = transformers.AutoModelForCausalLM
SIZE = {"vocab_size": 41, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "max_position_embeddings": 64}
GROUPED = {**HEADS, "num_key_value_heads": 2, "head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": ("gpt_neox", HEADS),
    "cohere": ("cohere", {**HEADS, "num_key_value_heads": 2, "logit_scale": 0.5, "pad_token_id": 0}),
    "granitemoe": (
        "granitemoe",
        {**HEADS, "num_key_value_heads": 2, "num_local_experts": 4, "logits_scaling": 6.0, "pad_token_id": 0},
    ),
    "olmo2": ("olmo2", GROUPED),
    "gemma2": ("gemma2", {**GROUPED, "sliding_window": 5, "final_logit_softcapping": 3.0, "pad_token_id": 0}),
    "gemma3_text": (
        "gemma3_text",
        {
            **GROUPED,
            "sliding_window": 5,
            "pad_token_id": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **HEADS,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}


def build(name: str, **more: Any) -> Any:
    model_type, settings = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZE, **{**settings, **SPECIAL, **more})
    kernel = "eager" if name == "gemma2" else "sdpa"
    model = AUTO.from_config(config, attn_implementation=kernel).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def tokens(length: int) -> torch.Tensor:
    return torch.randint(3, 41, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_a_captured_graph_is_the_next_logits(name: str) -> None:
    """Over all positions there is room for, whatever lies in those to come; on a CPU the same pass is not captured."""
    inner, text = build(name), tokens(12)
    model = Foreign(inner)
    state, rows = State(torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long)), torch.arange(2)
    cache = model.new_cache(3, 30)
    for layer in range(model.config.layers):
        for kept in cache.layer(layer):
            kept.normal_()
    step = SimpleNamespace(state=state, cache=cache, capacity=30, _model=lambda: model, glances=False)
    step._kept = partial(PlainGraphDecoder._kept, step)
    with torch.no_grad():
        whole = torch.stack([inner(text[:, : at + 1]).logits[:, -1] for at in range(12)], dim=1)
        for at in range(12):
            state.token[rows], state.position[rows] = text[:, at], torch.full((2,), at)
            found = PlainGraphDecoder._logits(step, 2)  # type: ignore[arg-type]
            torch.testing.assert_close(found, whole[:, at], atol=1e-4, rtol=1e-4)
    assert found.dtype == torch.float32


class State(NamedTuple):
    token: torch.Tensor
    position: torch.Tensor


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_graphs_draw_what_the_cpu_draws(name: str) -> None:
    inner = build(name)
    requests = [Request([3, 5 + i, 7], [10 * i, 10 * i + 1]) for i in range(4)]
    models = [Foreign(copy.deepcopy(inner)), Foreign(copy.deepcopy(inner).to("cuda"))]
    found = [TextEngine(m).generate(requests, Sampling(max_tokens=20)) for m in models]
    assert found[0].completions() == found[1].completions()
    torch.testing.assert_close(*(r.decisions["logp"] for r in found), atol=1e-3, rtol=1e-3)
    if (
        name.endswith("moe") and models[1] in graphs._broken
    ):  # some versions ask the host which experts have work
        return
    made = graphs._made[models[1]]
    assert isinstance(made, PlainGraphDecoder)
    assert made.glances == (name != "gemma2")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_rows_in_half_precision_are_near_float32(name: str, dtype: torch.dtype) -> None:
    """No further than rows that transformers attends in the same precision."""
    inner, text = build(name), tokens(16)[:1]
    lengths, nobody = torch.tensor([6, 10]), torch.tensor([0, 0])
    packing = pack(lengths, torch.tensor([0, 1]), nobody)
    positions = torch.arange(16)[None]
    true = Foreign(copy.deepcopy(inner)).hidden(text, positions)
    model = Foreign(inner.to("cuda", dtype))
    at = (text.cuda(), positions.cuda())
    packed, _ = model.hidden_states(*at, packing=packing.to("cuda"))
    off, plain = ((x.cpu().float() - true).norm() / true.norm() for x in (packed, model.hidden(*at)))
    assert model.packs
    assert off <= 1.5 * plain + 1e-3


@pytest.mark.parametrize("name", ["gpt_neox", "olmo2", "cohere"])
def test_the_final_norm_is_found(name: str) -> None:
    inner, text, seen = build(name), tokens(5), []
    hook = lambda *called: seen.append(called[2])  # noqa: E731
    inner.base_model.layers[-1].register_forward_hook(hook)
    model = Foreign(inner)
    with torch.no_grad():
        last, tapped = model.hidden_states(text, torch.arange(5).expand(2, 5), taps=[2])
        assert torch.equal(tapped[2], last)
        before = seen[-1][0] if isinstance(seen[-1], tuple) else seen[-1]
        torch.testing.assert_close(model.normed(before), last)


@pytest.mark.parametrize("name", MODELS)
def test_plain_cached_and_shared_agree_with_transformers(name: str) -> None:
    inner, text = build(name), tokens(16)
    model = Foreign(inner)
    with torch.no_grad():
        expected = inner(text).logits
        torch.testing.assert_close(model(text), expected, atol=1e-4, rtol=1e-4)

        row = torch.cat([text[:, :6], text[:, 6:].flip(1), text[:, 6:]], dim=1)
        positions = torch.cat([torch.arange(16), torch.arange(6, 16)]).expand(2, 26)
        segments = torch.tensor([0] * 6 + [1] * 10 + [2] * 10).expand(2, 26)
        shared = model.logits(model.hidden(row, positions, segments))
        both = torch.cat([shared[:, :6], shared[:, 16:]], dim=1)
        torch.testing.assert_close(both, expected, atol=1e-4, rtol=1e-4)

        cache = model.new_cache(2, 32)
        for part in torch.arange(16).expand(2, 16).split_with_sizes([9, 1, 6], dim=1):
            cache.begin(part)
            logits = model.logits(model.hidden(text.gather(1, part), part, cache=cache))
            torch.testing.assert_close(logits, expected[:, part[0]], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_attention_is_replaced_where_a_layer_asks_for_it_by_name(name: str) -> None:
    model = Foreign(build(name))
    assert model.replaced == model.packs == (name != "gemma2")  # whose scores are capped, which torch cannot


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gemma2"])
def test_packed_rows_are_what_transformers_says_and_so_is_their_slope(name: str) -> None:
    inner, text = build(name), tokens(16)[:1]
    model = Foreign(inner)
    expected = inner(text).logits[0]
    row = torch.cat([text[0, :6], text[0, 6:].flip(0), text[0, 6:], text[0, :4]])[None]
    positions = torch.cat([torch.arange(16), torch.arange(6, 16), torch.arange(4)])[None]
    packing = pack(torch.tensor([6, 10, 10, 4]), torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 0, 1]))
    states, tapped = model.hidden_states(row, positions, packing=packing, taps=[1])
    found = states[0] @ model.head_weight.t()
    for here, there in (
        (slice(0, 6), slice(0, 6)),
        (slice(16, 26), slice(6, 16)),
        (slice(26, 30), slice(0, 4)),
    ):
        torch.testing.assert_close(found[here], expected[there], atol=2e-5, rtol=1e-5)
    assert tapped[1].shape == states.shape
    weights, slope = list(inner.parameters()), torch.randn(10, 41)
    slopes = [torch.autograd.grad((x * slope).sum(), weights) for x in (found[16:26], expected[6:16])]
    for ours, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_layers_that_change_keys_or_add_to_scores_are_left_to_transformers() -> None:
    q, k, v = (torch.zeros(1, 2, 3, 4) for _ in range(3))
    asked = {
        "as given": Asked(q, k, v, None, beside=False),
        "other keys": Asked(q, k.clone(), v, None, beside=False),
        "other values": Asked(q, k, v.clone(), None, beside=False),
        "a bias": Asked(q, k, v, None, beside=True),
    }
    for case, by in asked.items():
        seen = Routed({0: (k, v)})
        seen.attend(0, by)
        assert seen.layers == ({0} if case == "as given" else set()), case
    narrow = torch.zeros(1, 2, 3, 2)  # values of another size than keys
    seen = Routed({0: (k, narrow)})
    seen.attend(0, Asked(q, k, narrow, None, beside=False))
    assert not seen.layers


@pytest.mark.parametrize(("given", "beside"), [({}, False), ({"softcap": 5.0}, True), ({"s_aux": 0}, True)])
def test_what_comes_into_scores_is_told(given: dict[str, Any], beside: bool) -> None:
    told: list[Asked] = []
    look = SimpleNamespace(attend=lambda layer, asked: told.append(asked))
    with looking(look):
        attention(SimpleNamespace(layer_idx=3), *torch.zeros(3, 1, 1, 1, 1), None, 0.5, dropout=0.0, **given)  # type: ignore[arg-type]
    assert (told[0].beside, told[0].scale) == (beside, 0.5)


def test_a_hybrid_of_attention_alone_has_no_experts(tmp_path: Path) -> None:
    """As Granite 4 350M and 1B are published."""
    settings = {**GROUPED, "layer_types": ["attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0}
    mamba = {"mamba_n_heads": 8, "shared_intermediate_size": 48, "logits_scaling": 4.0, "pad_token_id": 0}
    config = transformers.GraniteMoeHybridConfig(**SIZE, **settings, **mamba, **SPECIAL)
    AUTO.from_config(config).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert isinstance(model, Foreign)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(9)), model.inner(tokens(9)).logits, atol=1e-5, rtol=1e-5)


def test_windows_are_of_layers_that_slide() -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = {**GROUPED, **SIZE, "sliding_window": 5}
    whole = transformers.AutoConfig.for_model("gemma3_text", **config, layer_types=["full_attention"] * 2)
    mixed = transformers.AutoConfig.for_model("gemma3_text", **config, layer_types=kinds)
    one = transformers.AutoConfig.for_model("starcoder2", **config)
    assert [ForeignConfig.of(c).windows for c in (whole, mixed, one)] == [(0, 0), (5, 0), (5, 5)]


def test_a_config_that_has_no_one_answer_is_refused_in_a_sentence() -> None:
    class Config:
        model_type, num_attention_heads, hidden_size, vocab_size, num_hidden_layers = "layered", 2, 8, 9, 1

        @property
        def head_dim(self) -> int:
            raise LookupError("'head_dim' may vary across layers.")

    with pytest.raises(PanoplyError, match="'layered' cannot be used: 'head_dim' may vary across layers"):
        Foreign(SimpleNamespace(config=Config()))


def test_an_architecture_without_attention_of_torch_runs_eagerly(tmp_path: Path) -> None:
    sizes = {"vocab_size": 41, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64}
    AUTO.from_config(transformers.GPTJConfig(**sizes, **SPECIAL)).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert isinstance(model, Foreign)
    assert not model.replaced
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(9)), model.inner(tokens(9)).logits)


def test_keys_and_values_of_different_sizes_are_refused_in_a_sentence() -> None:
    config = transformers.DeepseekV3Config()
    with pytest.raises(PanoplyError, match=r"'deepseek_v3' has keys and values of different sizes"):
        ForeignConfig.of(config)


def test_what_is_saved_does_not_name_our_attention(tmp_path: Path) -> None:
    save_model(Foreign(build("cohere")), tmp_path)
    assert "panoply" not in (tmp_path / "config.json").read_text()
    assert AUTO.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_a_foreign_folder_loads_scores_and_saves(tmp_path: Path) -> None:
    inner, text = build("gpt_neox"), tokens(9)
    inner.save_pretrained(tmp_path / "m")
    model = load_model(tmp_path / "m")
    assert isinstance(model, Foreign)
    assert model.config.max_positions == 64
    torch.testing.assert_close(model(text), inner(text).logits, atol=1e-5, rtol=1e-5)
    save_model(model, tmp_path / "again")
    assert torch.equal(load_model(tmp_path / "again")(text), model(text))


def test_an_architecture_that_ignores_masks_is_refused() -> None:
    config = transformers.MambaConfig(vocab_size=41, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(PanoplyError, match="mamba"):
        Foreign(AUTO.from_config(config))


@pytest.mark.parametrize("size", [1e-4, 1.0])
def test_a_head_with_a_bias_is_refused_however_small_it_is(size: float) -> None:
    model = AUTO.from_config(transformers.AutoConfig.for_model("phi", **SIZE, **HEADS, **SPECIAL))
    torch.nn.init.normal_(model.lm_head.bias, std=size)
    with pytest.raises(PanoplyError, match="'phi' cannot be used: its head has a bias"):
        Foreign(model)


def test_another_multiple_of_the_logits_is_refused() -> None:
    inner = build("cohere")
    inner.logit_scale = 2.0
    with pytest.raises(PanoplyError, match="its logits are not its head times its last hidden state"):
        Foreign(inner)


def test_a_mask_that_is_not_obeyed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Foreign._masks
    monkeypatch.setattr(Foreign, "_masks", lambda s, *at: honest(s, *at) if at[2] is not None else None)
    with pytest.raises(PanoplyError, match="does not obey an attention mask"):
        Foreign(build("olmo2"))


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """As it is on the Hub: with dropout."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=41, n_embd=16, n_layer=1, n_head=2, n_positions=64, **SPECIAL)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_dropout_is_off_whatever_the_mode_and_saved_as_it_was(gpt2: Path, tmp_path: Path) -> None:
    model, text = load_model(gpt2), tokens(9)
    assert not model.training
    model.train()
    assert torch.equal(model(text), model(text))
    save_model(model, tmp_path / "again")
    for folder in (gpt2, tmp_path / "again"):
        assert json.loads((folder / "config.json").read_text())["attn_pdrop"] == 0.1
    assert torch.equal(model(text), model(text))


def test_transformers_draws_no_bars(gpt2: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    save_model(load_model(gpt2), tmp_path / "again")
    assert capfd.readouterr() == ("", "")


def test_threads_open_one_folder_together(gpt2: Path) -> None:
    """As those of `--cluster threads` do. Tied tables are not said to be missing, then or afterwards."""
    whole = load_model(gpt2).state_dict()
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(load_model, [gpt2] * 12), load_model(gpt2)]
    for model in found:
        assert all(torch.equal(weight, whole[name]) for name, weight in model.state_dict().items())


CODE = """
import pathlib
pathlib.Path({marker!r}).write_text("ran")
from transformers import GPT2Config, GPT2LMHeadModel
class Config(GPT2Config): model_type = "{kind}"
class Model(GPT2LMHeadModel): config_class = Config
"""


@pytest.mark.parametrize("kind", ["gpt2", "unheard_of"])
def test_code_in_a_folder_is_never_run_nor_asked_about(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    marker = tmp_path / "ran"
    (gpt2 / "code.py").write_text(CODE.format(marker=str(marker), kind=kind))
    raw = json.loads((gpt2 / "config.json").read_text())
    named = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (gpt2 / "config.json").write_text(json.dumps({**raw, "model_type": kind, "auto_map": named}))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    capfd.readouterr()
    if kind == "gpt2":
        model = load_model(gpt2)
        assert type(model.inner).__module__.startswith("transformers.models.")  # type: ignore[union-attr]
        save_model(model, tmp_path / "again")
        assert "auto_map" not in json.loads((tmp_path / "again/config.json").read_text())
    else:
        with pytest.raises(PanoplyError, match="transformers cannot open"):
            load_model(gpt2)
    assert not marker.exists()
    assert "y" in (sys.stdin.read(1)), "nobody read the answer"
    assert capfd.readouterr() == ("", "")


def test_an_adapter_in_the_folder_does_not_lead_to_another_model(gpt2: Path) -> None:
    (gpt2 / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "someone/else", "peft_type": "LORA"}'
    )
    with pytest.raises(PanoplyError, match="holds an adapter beside a model"):
        load_model(gpt2)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("all missing", r"lack .*transformer\.h\.0"),
        ("one missing", "lack transformer.h.0.attn.c_attn.bias"),
        ("surplus", "hold .*stranger, unknown to its config.json"),
        ("shape", "transformer.ln_f.weight"),
        ("nan", "not finite: transformer.ln_f.weight holds nan"),
        ("pickle", "pickled weights, which are never opened"),
    ],
)
def test_weights_that_are_not_all_of_the_models(gpt2: Path, how: str, sentence: str) -> None:
    file = gpt2 / "model.safetensors"
    weights = load_file(file)
    if how == "all missing":
        weights = {"stranger": torch.zeros(2)}
    elif how == "one missing":
        del weights["transformer.h.0.attn.c_attn.bias"]
    elif how == "surplus":
        weights["stranger"] = torch.zeros(2)
    elif how == "shape":
        weights["transformer.ln_f.weight"] = torch.zeros(3)
    elif how == "nan":
        weights["transformer.ln_f.weight"][2] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    if how == "pickle":
        file.rename(gpt2 / "pytorch_model.bin")
    with pytest.raises(PanoplyError, match=sentence) as raised:
        load_model(gpt2)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_head", [2]),
        ("n_embd", 10**15),
        ("n_layer", -1),
        ("n_head", 0),
        ("vocab_size", None),
        ("n_positions", "x"),
    ],
)
def test_a_foreign_config_of_wrong_types_and_sizes(gpt2: Path, field: str, value: object) -> None:
    raw = json.loads((gpt2 / "config.json").read_text())
    (gpt2 / "config.json").write_text(json.dumps({**raw, field: value}))
    with pytest.raises(PanoplyError) as raised:
        load_model(gpt2)
    assert "\n" not in str(raised.value)
