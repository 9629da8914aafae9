"""How long a sequence may be: longrope on both sides of its original length, and what `policy.context` asks for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import own_model
import pytest
import tiny
import torch
import transformers

import panoply as pp
from panoply.errors import PanoplyError
from panoply.policies.build import reads
from panoply.policies.classifier import open_judge
from panoply.policies.decoder_config import DecoderConfig
from panoply.policies.folder import load_model, save_model
from panoply.policies.foreign import Foreign
from panoply.policies.rotary import reach
from panoply.policies.text import TextPolicy
from panoply.policies.value import ValueModel
from panoply.report.text import planned
from panoply.rollout.engine import Request
from panoply.rollout.engines import engine_of
from panoply.rollout.sampling import Sampling
from panoply.rollout.text import Collector
from panoply.run import Run
from panoply.serving.protocol import Asked, Refused
from panoply.serving.speaker import Speaker
from panoply.worlds.text.chain import Chain

AUTO: Any = transformers.AutoModelForCausalLM
ORIGINAL, LONGEST = 24, 96
FACTORS = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [2.0, 3.0, 5.0, 8.0]}
SIZE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def theirs(model_type: str = "phi3", vocabulary: int = 50, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        model_type, vocab_size=vocabulary, **{**SIZE, "eos_token_id": None, **settings}
    )
    model = AUTO.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


def longrope(**settings: Any) -> Any:
    rope = {"rope_type": "longrope", "rope_theta": 100.0, **FACTORS}
    lengths = {"max_position_embeddings": LONGEST, "original_max_position_embeddings": ORIGINAL}
    return theirs(rope_parameters=rope, **{**lengths, **settings})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A longrope model that speaks bytes."""
    made, words = tmp_path_factory.mktemp("own") / "model", own_model.tokenizer()
    longrope(vocabulary=len(words), eos_token_id=words.eos_token_id).save_pretrained(made)
    words.save_pretrained(made)
    return made


def sequences(length: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------ against transformers


def test_logits_are_those_of_transformers_on_both_sides_of_the_original_length(tmp_path: Path) -> None:
    """What transformers takes from the batch, here the context says: short sequences turn by the long factors, too."""
    model = longrope()
    model.save_pretrained(tmp_path)
    short, long = load_model(tmp_path), load_model(tmp_path, context=LONGEST)
    assert (short.config.max_positions, long.config.max_positions) == (ORIGINAL, LONGEST)
    with torch.no_grad():
        for length in (1, 7, ORIGINAL):
            tokens = sequences(length)
            torch.testing.assert_close(short(tokens), model(tokens).logits, atol=1e-5, rtol=1e-5)
        for length in (ORIGINAL + 1, 60, LONGEST):
            tokens = sequences(length)
            torch.testing.assert_close(long(tokens), model(tokens).logits, atol=1e-5, rtol=1e-5)
        whole = model(sequences(LONGEST)).logits[:, :ORIGINAL]
        torch.testing.assert_close(long(sequences(LONGEST)[:, :ORIGINAL]), whole, atol=1e-5, rtol=1e-5)
        assert (long(sequences(7)) - short(sequences(7))).abs().max() > 0.1, "they are other factors"


def test_only_more_than_the_original_length_takes_the_long_factors(tmp_path: Path) -> None:
    longrope().save_pretrained(tmp_path)
    first = {n: load_model(tmp_path, context=n).config.frequencies()[0] for n in (2, ORIGINAL, ORIGINAL + 1)}  # type: ignore[union-attr]
    assert torch.equal(first[2][0], first[ORIGINAL][0])
    assert not torch.equal(first[ORIGINAL][0], first[ORIGINAL + 1][0])
    scale = math.sqrt(1 + math.log(LONGEST / ORIGINAL) / math.log(ORIGINAL))
    assert [factor for _, factor in first.values()] == [pytest.approx(scale)] * 3


@pytest.mark.parametrize("context", [0, ORIGINAL + 3, LONGEST])
def test_a_saved_folder_says_what_it_said_before(tmp_path: Path, context: int) -> None:
    longrope().save_pretrained(tmp_path / "theirs")
    save_model(load_model(tmp_path / "theirs", context=context), tmp_path / "ours")
    before, after = (
        transformers.AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("theirs", "ours")
    )
    before["rope_parameters"]["type"] = "longrope"
    for name in ("max_position_embeddings", "original_max_position_embeddings", "rope_parameters"):
        assert after[name] == before[name]
    reopened, tokens = AUTO.from_pretrained(tmp_path / "ours").eval(), sequences(60)
    with torch.no_grad():
        expected = AUTO.from_pretrained(tmp_path / "theirs").eval()(tokens).logits
        torch.testing.assert_close(reopened(tokens).logits, expected, atol=1e-5, rtol=1e-5)
    assert load_model(tmp_path / "ours").config.max_positions == ORIGINAL


@pytest.mark.parametrize("more", [{}, {"factor": 3.0}, {"factor": 4.0}, {"attention_factor": 1.5}])
def test_longrope_of_phi3_is_said_in_three_settings_where_they_say_it_all(more: dict[str, float]) -> None:
    """Releases before transformers 5 refuse a `rope_scaling` of it that says more."""
    raw = longrope().config.to_dict()
    raw["rope_parameters"] |= more
    written = DecoderConfig.from_hf(raw).to_hf()
    terse = written["rope_scaling"] == {"type": "longrope", **FACTORS}
    assert terse == (more in ({}, {"factor": LONGEST / ORIGINAL}))
    rotary = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding
    before, after = (rotary(transformers.Phi3Config.from_dict(said)) for said in (raw, written))
    assert after.attention_scaling == before.attention_scaling
    assert torch.equal(after.inv_freq, before.inv_freq)


@pytest.mark.parametrize(
    ("where", "original"), [("both", 16), ("rope", 4096), ("outside", 16), ("nowhere", 4096)]
)
def test_the_original_length_is_found_where_transformers_looks_for_it(where: str, original: int) -> None:
    raw = longrope(max_position_embeddings=8192).config.to_dict()
    rope = dict(raw.pop("rope_parameters"))
    rope["original_max_position_embeddings"], raw["original_max_position_embeddings"] = 64, 16
    if where in ("outside", "nowhere"):
        del rope["original_max_position_embeddings"]
    if where in ("rope", "nowhere"):
        del raw["original_max_position_embeddings"]
    raw = {**raw, "rope_parameters": rope}
    made = transformers.Phi3Config(**{k: v for k, v in raw.items() if k != "model_type"})
    assert made.rope_parameters["original_max_position_embeddings"] == original
    assert DecoderConfig.from_hf(raw).max_positions == original


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("yarn", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}),
        ("llama3", {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("linear", {"rope_type": "linear", "factor": 4.0}),
    ],
)
def test_other_scalings_are_the_same_at_every_length(tmp_path: Path, name: str, rope: dict[str, Any]) -> None:
    """And YaRN's reach is counted, whose users leave `max_position_embeddings` as it was."""
    settings = {"rope_parameters": {**rope, "rope_theta": 100.0}, "max_position_embeddings": 24}
    model = theirs("llama", **settings)
    model.save_pretrained(tmp_path)
    decoder = load_model(tmp_path)
    assert decoder.config.max_positions == (96 if name == "yarn" else 24)
    with torch.no_grad():
        for length in (5, 24, 96 if name == "yarn" else 24):
            tokens = sequences(length)
            torch.testing.assert_close(decoder(tokens), model(tokens).logits, atol=1e-5, rtol=1e-5)
    save_model(decoder, tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["max_position_embeddings"] == 24
    with pytest.raises(PanoplyError, match=r"reads at most \d+ tokens: a context of 97 is too long"):
        load_model(tmp_path, context=97)


def test_attn_factor_multiplies_what_yarn_makes_of_the_stretch(tmp_path: Path) -> None:
    """As in vLLM. transformers passes it over, and is told the product in what is saved."""
    usual = 0.1 * math.log(4) + 1
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 100.0}
    settings = {"max_position_embeddings": 96, "tie_word_embeddings": False}
    model = theirs("llama", rope_parameters={**rope, "attention_factor": 0.7 * usual}, **settings)
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["rope_parameters"] = {**rope, "attn_factor": 0.7}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    decoder, tokens = load_model(tmp_path), sequences(90)
    save_model(decoder, tmp_path / "again")
    again = type(model).from_pretrained(tmp_path / "again", local_files_only=True)
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens), model(tokens).logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, atol=1e-5, rtol=1e-5)
    written = json.loads((tmp_path / "again/config.json").read_text())["rope_parameters"]
    assert written["attn_factor"] == 0.7
    assert reads(str(tmp_path), Chain(), 0).startswith("attn_factor of its positions counts, as in vLLM")
    raw["rope_parameters"] |= {"rope_type": "linear"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(PanoplyError, match=r"rope_parameters\.attn_factor to 0\.7"):
        load_model(tmp_path)


def test_a_length_outside_of_the_scaling_comes_first_as_in_transformers() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 100.0}
    model = theirs(
        "llama", rope_parameters=rope, original_max_position_embeddings=12, max_position_embeddings=48
    )
    ours = DecoderConfig.from_hf(model.config.to_dict()).frequencies()[0][0]
    torch.testing.assert_close(ours, model.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("settings", "usual"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}}, 24),
        (
            {
                "rope_parameters": {"rope_type": "longrope", "rope_theta": 100.0, **FACTORS},
                "original_max_position_embeddings": 12,
            },
            12,
        ),
    ],
)
def test_through_transformers_a_sequence_ends_where_its_factors_would_change(
    settings: dict[str, Any], usual: int
) -> None:
    model = Foreign(theirs("qwen2", max_position_embeddings=24, **settings))
    assert model.config.max_positions == usual
    with pytest.raises(PanoplyError, match=f"reads at most {usual} tokens here"):
        Foreign(theirs("qwen2", max_position_embeddings=24, **settings), context=25)


# ------------------------------------------------------------------ sampled, scored and trained


@pytest.fixture(scope="module")
def own(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Prompts on both sides of the original length, and what they earn."""
    place = tmp_path_factory.mktemp("data")
    lines = [{"prompt": "Q" * (3 if i % 2 else 20)} for i in range(10)]
    (place / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "reward.py").write_text(
        "def long(completions, **_):\n    return [len(c) for c in completions]\n"
    )
    data, reward = str(place / "data.jsonl"), f"{place / 'reward.py'}:long"
    return {"data": data, "reward": reward, "model": str(folder), "steps": 1, "held_out": 1}


def page(made: Any) -> str:
    """What a plan says, in one line."""
    return " ".join(planned(made).split())


FEW = {"sample.prompts": 4, "sample.group": 2, "sample.max_tokens": 40, "run.evaluate_every": 0}


@pytest.mark.parametrize("context", [0, LONGEST])
def test_what_is_sampled_across_the_original_length_is_scored_alike(
    folder: Path, own: dict[str, Any], context: int
) -> None:
    """Sampled token by token from a cache; scored in rows that share a prompt, and each by itself."""
    policy = TextPolicy.load(folder, context=context)
    collect = Collector(pp.plan("grpo", **own, settings=FEW).world(), policy, 0)
    rows = collect.episodes(collect.tasks(4), 2)
    assert (int(rows["position"].max()) > ORIGINAL) == (context > ORIGINAL)
    for shared in (True, False):
        policy.shared = shared
        with torch.no_grad():
            scored = policy.score(rows)["logp"]
        torch.testing.assert_close(scored, rows["logp"].float(), atol=1e-5, rtol=1e-5)


def test_a_run_and_whoever_opens_it_have_the_context_that_was_asked_for(
    own: dict[str, Any], tmp_path: Path
) -> None:
    made = pp.plan("grpo", **own, settings={**FEW, "policy.context": "64"})
    assert made.policy_options == {"context": 64}
    assert "64 tokens: more than the 24 that the model was made for" in page(made)
    notes = tiny.Notes()
    done = pp.train(made, run=tmp_path / "run", progress=notes)
    assert any("longrope's long factors" in said for said in notes.said)
    logged = Run.open(done.run).metrics()
    assert max(row["step0_gap"] for row in logged) < 1e-5
    model = done.run / "checkpoints/step-0000001/model"
    for source in (done.run, model.parent, model):
        assert pp.load_policy(source).context_length == 64
    assert pp.load_policy(done.run, context=90).context_length == 90
    assert len(pp.sample(done.run, "Q" * 30, max_tokens=4, which="last")) == 1
    again = pp.plan("grpo", **{**own, "model": str(done.run)}, settings=FEW)
    assert "64 tokens: more than the 24" in page(again), "it goes on as it was trained"


def test_the_plan_says_by_which_factors_and_what_else_there_is(own: dict[str, Any]) -> None:
    said = page(pp.plan("grpo", **own, settings=FEW))
    assert "24 tokens: all sequences turn by longrope's short factors. Up to 96 can be asked for" in said
    with pytest.raises(PanoplyError, match="reads at most 96 tokens: a context of 97 is too long"):
        pp.plan("grpo", **own, settings={**FEW, "policy.context": 97})
    for value, why in ((0, "at least 2, not 0"), ("many", "policy.context")):
        with pytest.raises(PanoplyError, match=why):
            pp.plan("grpo", **own, settings={**FEW, "policy.context": value})
    with pytest.raises(PanoplyError, match="policy.hidden has no effect.*policy.context alone"):
        pp.plan("grpo", **own, settings={**FEW, "policy.hidden": 4})
    with pytest.raises(PanoplyError, match="policy.context has no effect on new weights"):
        pp.plan("grpo", "chain", model="fresh", settings={"policy.context": 64})
    assert "context" not in page(pp.plan("grpo", "chain"))


def test_whoever_is_too_long_is_told_what_to_ask_for(folder: Path) -> None:
    hint = r"up to 96, by other factors .*--set policy\.context=N"
    with pytest.raises(PanoplyError, match=f"leaves no room in the model's context of 24. It can be {hint}"):
        pp.sample(folder, "Q" * 30)
    assert len(pp.sample(folder, "Q" * 30, context=64, max_tokens=3)) == 1
    policy = TextPolicy.load(folder)
    with pytest.raises(PanoplyError, match=hint):
        policy.model(sequences(ORIGINAL + 1))
    with pytest.raises(PanoplyError, match=hint):
        engine_of(policy).generate([Request([1] * 30, [0])], Sampling(max_tokens=2))
    asked = Asked.of({"messages": [{"role": "user", "content": "Q" * 30}]})
    short, long = (Speaker(one, "tiny") for one in (policy, TextPolicy.load(folder, context=LONGEST)))
    with pytest.raises(Refused, match=hint):
        short.answer(asked)
    assert long.answer(asked)["choices"]


def test_a_judge_reads_what_the_policy_may_write(folder: Path, tmp_path: Path) -> None:
    policy = TextPolicy.load(folder)
    save_model(ValueModel.of(policy), tmp_path / "judge", files_beside=policy.tokenizer.files)
    for context, longest in ((0, ORIGINAL), (64, 64), (500, LONGEST)):
        judge = open_judge(tmp_path / "judge", torch.float32, "cpu", policy.tokenizer, context)
        assert isinstance(judge, ValueModel)
        assert judge.trunk.context_length == longest


def test_reach() -> None:
    assert reach({}, 64) == (64, 64)
    assert reach({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 128) == (
        128,
        128,
    )
    assert reach({"rope_type": "longrope", "original_max_position_embeddings": 16}, 8) == (8, 8)
