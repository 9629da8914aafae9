"""PEFT's folders: what PEFT wrote is opened and trained on, what we write PEFT opens, and what does not fit is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import panoply as pp
from panoply.costs import cost
from panoply.errors import PanoplyError
from panoply.loops.seat import Seat
from panoply.policies import lora, low_rank
from panoply.policies.adapter_config import CONFIG, WEIGHTS
from panoply.policies.text import TextPolicy
from panoply.run import Run

peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
START = tiny.ROOT / "panoply/assets/chain-start"
TOKENS = torch.tensor([[3, 4, 5, 6, 7]])


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """An adapter that PEFT made and saved on chain's warm start, as another program would have."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False, use_rslora=True,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(START), config).save_pretrained(
        tmp_path / "theirs"
    )
    return tmp_path / "theirs"


def logits(folder: Path) -> Tensor:
    """What PEFT says that a folder is."""
    with torch.no_grad():
        found: Tensor = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()(TOKENS).logits
    return found


def run(folder: Path, method: str = "sft", **more: Any) -> pp.Trained:
    settings = {"run.checkpoint_every": 1, "run.keep": 9, "run.device": "cpu", **more.pop("settings", {})}
    return tiny.train(folder, method, settings=settings, **{"model": "start", "lora": 2, "steps": 2, **more})


def test_an_adapter_of_peft_opens_merged(theirs: Path) -> None:
    policy = TextPolicy.load(theirs)
    with torch.no_grad():
        torch.testing.assert_close(policy.model(TOKENS), logits(theirs), atol=1e-4, rtol=1e-4)
        assert (policy.model(TOKENS) - TextPolicy.load(START).model(TOKENS)).abs().max() > 1e-2
    assert all(type(m) is not low_rank.LowRankLinear for m in policy.model.modules())
    assert "= adapters" not in str(pp.plan("sft", model=str(theirs)))


def test_training_goes_on_with_an_adapter_of_peft(theirs: Path, tmp_path: Path) -> None:
    plan = pp.plan("sft", model=str(theirs), lora=4, settings={"run.device": "cpu"})
    begun = Seat(plan, plan.world())
    for name, layer in low_rank.adapters(begun.policy.model):  # type: ignore[attr-defined]
        assert name.endswith(("q_proj", "down_proj"))
        assert layer.scale == 16 / 4**0.5
    saved = load_file(theirs / WEIGHTS)
    factors = {n: p for n, p in begun.policy.named_parameters() if p.requires_grad}
    assert len(factors) == len(saved)
    assert all(torch.equal(p, saved[f"base_model.model.{n}.weight"]) for n, p in factors.items())
    done = run(tmp_path / "run", model=str(theirs), lora=4, steps=2)
    first, *_ = sorted((done.run / "checkpoints").glob("step-*"))
    torch.testing.assert_close(logits(first / "model"), logits(theirs), atol=1e-5, rtol=1e-5)
    out = pp.export(done.run, tmp_path / "out", which="last", adapter=True)
    assert json.loads((out / CONFIG).read_text())["base_model_name_or_path"] == str(START)
    merged = pp.export(done.run, tmp_path / "merged", which="last")
    with torch.no_grad():
        found = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()(TOKENS).logits
    torch.testing.assert_close(logits(out), found, atol=1e-4, rtol=1e-4)
    assert (found - logits(theirs)).abs().max() > 1e-3


@pytest.fixture
def patterned(tmp_path: Path) -> Path:
    """An adapter of PEFT whose layers differ in rank and α."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False,
        task_type="CAUSAL_LM", rank_pattern={r"layers\.1\..*\.q_proj": 2, "down_proj": 3}, use_rslora=True,
        alpha_pattern={"v_proj": 20, r".*\.0\.mlp\.down_proj": 1},
    )  # fmt: skip
    peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(START), config).save_pretrained(
        tmp_path / "patterned"
    )
    return tmp_path / "patterned"


def test_every_layer_has_the_rank_and_the_alpha_that_its_pattern_says(
    patterned: Path, tmp_path: Path
) -> None:
    with torch.no_grad():
        found = TextPolicy.load(patterned).model(TOKENS)
    torch.testing.assert_close(found, logits(patterned), atol=1e-4, rtol=1e-4)
    plan = pp.plan("sft", model=str(patterned), lora=4, settings={"run.device": "cpu"})
    layers = [layer for _, layer in low_rank.adapters(cast(Any, Seat(plan, plan.world()).policy).model)]
    assert len({len(layer.lora_A) for layer in layers}) > 1
    assert cost(plan).trainable == sum(layer.lora_A.numel() + layer.lora_B.numel() for layer in layers)
    done = run(tmp_path / "run", model=str(patterned), lora=4, steps=1, settings={"update.lr": 1e-12})
    last = sorted((done.run / "checkpoints").glob("step-*"))[-1] / "model"
    torch.testing.assert_close(logits(last), logits(patterned), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        again = TextPolicy.load(last).model(TOKENS)
    torch.testing.assert_close(again, logits(patterned), atol=1e-4, rtol=1e-4)


def test_the_start_of_a_run_that_goes_on_is_its_reference(theirs: Path) -> None:
    plan = pp.plan(
        "grpo",
        model=str(theirs),
        lora=4,
        settings={"run.device": "cpu", "regularise.kl": 0.1},
    )
    seat = Seat(plan, plan.world())
    with torch.no_grad():
        said = seat.snapshots.policy_of("reference").model(TOKENS)
        assert torch.equal(said, seat.policy.model(TOKENS))  # type: ignore[attr-defined]
        for _, layer in low_rank.adapters(seat.policy.model):  # type: ignore[attr-defined]
            layer.lora_B += 1
            layer.merge()
        assert torch.equal(said, seat.snapshots.policy_of("reference").model(TOKENS))


@pytest.mark.parametrize("model", ["start", "fresh"])
def test_a_checkpoint_holds_factors_alone_and_resumes_bit_for_bit(model: str, tmp_path: Path) -> None:
    settings = {"regularise.kl": 0.1, "update.lr": 1e-3}
    whole = run(tmp_path / "whole", "grpo", model=model, steps=3, settings=settings)
    last = sorted((whole.run / "checkpoints").glob("step-*"))[-1]
    if model == "start":
        assert sorted(f.name for f in last.rglob("*.safetensors")) == [WEIGHTS, "state.safetensors"]
    kept = load_file(last / "state.safetensors")
    assert all(".lora_" in name for name in kept if name.endswith(":exp_avg"))
    assert not [name for name in kept if name.endswith(":master")]
    before = pp.load_policy(last / "model").fingerprint()
    shutil.copytree(whole.run, tmp_path / "cut")
    (tmp_path / "cut" / "result.json").unlink()
    for step in (2, 3):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"step-000000{step}")
    resumed = tiny.resume(tmp_path / "cut")
    assert resumed.fingerprint == whole.fingerprint
    assert pp.load_policy(resumed.run / "checkpoints" / last.name / "model").fingerprint() == before


def test_a_whole_run_is_that_of_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GRPO with a KL term, from the same factors: merged weights and PEFT's separate products learn the same."""
    settings = {
        "regularise.kl": 0.1, "update.lr": 1e-3, "reward.name": "ended"
    }  # fmt: skip
    ours = run(tmp_path / "ours", "grpo", model="fresh", steps=3, settings=settings)

    def through_peft(
        opened: Any, source: str, _: Path, rank: int, seed: int, settings: lora.Lora, device: torch.device
    ) -> TextPolicy:
        assert device.type == "cpu"
        native = lora.add_lora(opened(source), rank, seed, settings)
        found = lora._through_peft(opened(source), rank, seed, settings, None)
        with torch.no_grad():
            for name, layer in low_rank.adapters(native.model):
                found.model.base_model.model.get_submodule(name).lora_A["default"].weight.copy_(layer.lora_A)
        return found

    monkeypatch.setattr("panoply.loops.seat.open_adapted", through_peft)
    theirs = run(tmp_path / "theirs", "grpo", model="fresh", steps=3, settings=settings)
    start, mine, other = (
        dict(pp.load_policy(done.run, which=which).named_parameters())
        for done, which in ((ours, 0), (ours, "last"), (theirs, "last"))
    )
    for name, weight in mine.items():
        moved = (weight - start[name]).norm()
        assert (weight - other[name]).norm() <= 1e-3 * moved, name
        assert bool(moved) == name.endswith("_proj.weight")
    for one, two in zip(*(Run.open(done.run).metrics() for done in (ours, theirs)), strict=True):
        assert one["kl"] == pytest.approx(two["kl"], abs=1e-6)
        assert one["gradient_norm"] == pytest.approx(two["gradient_norm"], rel=1e-3)


def test_what_does_not_fit_is_told(theirs: Path, tmp_path: Path) -> None:
    def spoilt(
        name: str, said: dict[str, Any] | None = None, weights: dict[str, Tensor] | None = None
    ) -> str:
        shutil.copytree(theirs, tmp_path / name)
        config = json.loads((theirs / CONFIG).read_text()) | (said or {})
        (tmp_path / name / CONFIG).write_text(json.dumps(config))
        if weights is not None:
            save_file(weights, tmp_path / name / WEIGHTS)
        return str(tmp_path / name)

    weights = load_file(theirs / WEIGHTS)
    first = sorted(weights)[0]
    wrong = {
        "another": (spoilt("a", weights={n.replace("layers.0", "layers.40"): w for n, w in weights.items()}),
                    "is of another base than .*, which has no layer model.layers.40"),
        "wide": (spoilt("b", weights={n: w.repeat(2, 2) for n, w in weights.items()}), "is of another base than"),
        "half": (spoilt("c", weights={n: w for n, w in weights.items() if n != first}), "lacks lora_A of"),
        "kind": (spoilt("d", {"peft_type": "IA3"}), "of the kind IA3: only LORA can be opened"),
        "nothing": (spoilt("e", {"r": 0}), "r and lora_alpha must be above 0"),
        "less": (spoilt("l", {"alpha_pattern": {"q_proj": 0}}), "r and lora_alpha must be above 0"),
        "rank": (spoilt("m", {"r": 8}), r"says that model.layers.0.mlp.down_proj has rank 8, and its .* have rank 4"),
        "ranks": (spoilt("n", {"rank_pattern": {"q_proj": 2}}), "q_proj has rank 2, and its factors have rank 4"),
        "pattern": (spoilt("o", {"alpha_pattern": {"(": 2}}), "has a pattern that is none"),
        "some": (spoilt("p", {"alora_invocation_tokens": [1, 2]}), "cannot be merged: aLoRA does not support merging"),
        "empty": (spoilt("f", weights={}), "holds no adapter: adapter_model.safetensors is empty"),
        "fewer": (spoilt("g", weights={n: w for n, w in weights.items() if "0.self_attn.q_proj" not in n}),
                  "lacks factors of model.layers.0.self_attn.q_proj"),
        "words": (spoilt("q", {"target_modules": "("}), "names its layers by a pattern that is none"),
        "whole": (spoilt("r", weights={n: w.to(torch.int8) for n, w in weights.items()}), "no floating-point numbers"),
        "nobody's": (spoilt("h", {"base_model_name_or_path": None}), "does not say which model its adapter is of"),
        "gone": (spoilt("i", {"base_model_name_or_path": str(tmp_path / "gone")}), "where there is no model"),
        "tables": (spoilt("j", weights={**weights, "base_model.model.lm_head.weight": weights[first] + 0}),
                   "is of another base than its own"),
        "nan": (spoilt("k", weights={**weights, first: weights[first] * float("nan")}), "not finite"),
        "eight bits": (
            spoilt("z", weights={**weights, first: weights[first].to(torch.float8_e4m3fn)}),
            "is of torch.float8_e4m3fn",
        ),
    }  # fmt: skip
    for folder, sentence in wrong.values():
        with pytest.raises(PanoplyError, match=sentence):
            TextPolicy.load(folder)
    with pytest.raises(PanoplyError, match="has rank 4: go on with it by --lora 4"):
        pp.plan("sft", model=str(theirs), lora=8)
    with pytest.raises(
        PanoplyError, match=r"lora\.alpha has no effect: the adapter in .* has its own settings"
    ):
        pp.plan("sft", model=str(theirs), lora=4, settings={"lora.alpha": 8})


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"lora": 0}, "--lora 0 leaves adapters nothing to learn"),
        ({"settings": {"lora.alpha": 8}}, "lora.alpha has no effect without adapters"),
        ({"lora": 2, "settings": {"lora.alpha": 0}}, "lora.alpha must be above 0"),
        ({"lora": 2, "settings": {"lora.dropout": 0.1}}, "Unknown lora setting 'dropout'"),
        ({"lora": 2, "settings": {"lora.target_modules": "kproj"}}, "Did you mean 'k_proj'"),
        (
            {"lora": 2, "settings": {"lora.target_modules": "embed_tokens"}},
            "tables of tokens get no adapters",
        ),
        ({"lora": 2, "settings": {"lora.target_modules": "lm_head"}}, "tables of tokens get no adapters"),
        ({"lora": 2, "settings": {"lora.target_modules": "input_layernorm"}}, "that is no linear layer"),
        ({"lora": 4096}, "is more than .* allows"),
        ({"lora": 2, "world": "cartpole", "method": "ppo"}, "--lora is for models of text"),
        ({"lora": 2, "method": "reward-model"}, "trains a judge"),
    ],
)
def test_what_a_plan_refuses_of_adapters(choices: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        pp.plan(choices.pop("method", "sft"), choices.pop("world", "chain"), **choices)


def test_a_pattern_names_linear_layers_and_passes_over_what_is_none() -> None:
    settings = {"lora.target_modules": "*.layers.0.*", "run.device": "cpu"}
    plan = pp.plan("sft", "chain", lora=2, settings=settings)
    adapted = dict(low_rank.adapters(cast(Any, Seat(plan, plan.world()).policy).model))
    assert {name.split(".")[2] for name in adapted} == {"0"}
    assert len(adapted) == 7
    learning = (factor for layer in adapted.values() for factor in (layer.lora_A, layer.lora_B))
    assert cost(plan).trainable == sum(factor.numel() for factor in learning)


@pytest.mark.parametrize(
    "said",
    [
        {"alpha_pattern": {"v_proj": 32}},
        {"rank_pattern": {"v_proj": 8}},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"bias": "all"},
    ],
    ids=str,
)
def test_dora_goes_on_with_all_that_its_folder_says(said: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"], use_dora=True, task_type="CAUSAL_LM", **said
    )
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(START), config)
    with torch.no_grad():
        for weight in (p for p in model.parameters() if p.requires_grad):
            weight += 0.05 * torch.randn_like(weight)
    model.save_pretrained(tmp_path / "theirs")
    settings = {"update.lr": 1e-12}
    done = run(tmp_path / "run", model=str(tmp_path / "theirs"), lora=4, steps=1, settings=settings)
    found = done.policy(which="last").model(TOKENS).detach()
    torch.testing.assert_close(found, logits(tmp_path / "theirs"), atol=1e-4, rtol=1e-4)
    out = pp.export(done.run, tmp_path / "out", which="last", adapter=True)
    torch.testing.assert_close(logits(out), logits(tmp_path / "theirs"), atol=1e-5, rtol=1e-5)


def test_a_critic_begins_as_a_policy_with_dora(tmp_path: Path) -> None:
    """Its weights are merged into a model of its own, all of which may learn."""
    done = tiny.bare(
        tmp_path / "run", "dapo-direct", lora=2, steps=1, settings={"lora.dora": True, "run.device": "cpu"}
    )
    assert done.fingerprint


def test_dora_goes_through_peft_and_says_so(tmp_path: Path) -> None:
    notes = tiny.Notes()
    done = run(tmp_path / "run", steps=1, settings={"lora.dora": True, "update.lr": 1e-3}, progress=notes)
    assert "DoRA goes through PEFT, which is several times slower" in notes.said[0]
    folder = pp.export(done.run, tmp_path / "out", which="last", adapter=True)
    assert json.loads((folder / CONFIG).read_text())["use_dora"]
    with torch.no_grad():
        merged = TextPolicy.load(folder).model(TOKENS)
    torch.testing.assert_close(merged, logits(folder), atol=1e-4, rtol=1e-4)
    again = run(tmp_path / "again", steps=1, model=str(folder), progress=notes)
    assert again.fingerprint
