"""Adapters on experts: merged as the formula says, slopes without ∂W, and PEFT's folders in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_experts import CONFIGS
from test_text import RAGGED, TOKENIZER, experience
from torch import Tensor

import panoply as pp
from panoply.costs import cost
from panoply.errors import PanoplyError
from panoply.lora import Lora
from panoply.policies import low_rank
from panoply.policies.adapter_config import going_on
from panoply.policies.decoder import DecoderConfig
from panoply.policies.experts import Mixing
from panoply.policies.folder import load_model
from panoply.policies.lora import add_lora, begun_with, load_adapter, save_adapter
from panoply.policies.text import TextPolicy
from panoply.worlds.text.chain import Chain

BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LAYOUTS: dict[str, dict[str, Any]] = {
    **CONFIGS,
    "published sinks": {**CONFIGS["sinks"], "mixing": Mixing(6, 3, 20, bias=True, alpha=1.702, limit=7.0)},
    "all sparse": {"model_type": "qwen3_moe", "mixing": Mixing(6, 2, 20)},
    "mixtral": {"model_type": "mixtral", "mixing": Mixing(5, 2, 20)},
    "olmoe": {"model_type": "olmoe", "mixing": Mixing(5, 2, 20, normalised=False)},
}
DATA = experience(RAGGED)


def fresh(kind: str, dtype: torch.dtype = torch.float32) -> TextPolicy:
    config = DecoderConfig(14, width=32, layers=3, heads=4, kv_heads=2, max_positions=256, **LAYOUTS[kind])
    return TextPolicy.fresh(config, TOKENIZER, 3, dtype)


def moved(kind: str, targets: tuple[str, ...] = BOTH, dtype: torch.dtype = torch.float32) -> TextPolicy:
    """A policy whose adapters have learned something."""
    policy = add_lora(fresh(kind, dtype), 3, settings=Lora(target_parameters=targets, alpha=4.0))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, layer in low_rank.adapters(policy.model):
            for factor in (layer.lora_A, layer.lora_B):
                factor.copy_(0.2 * torch.randn(factor.shape, generator=generator))
    low_rank.merge(policy.model)
    return policy


@pytest.mark.parametrize("kind", ["experts", "sinks"])
def test_slopes_are_those_that_the_whole_weights_give(kind: str) -> None:
    """With W = W₀ + s·B·A: ∂A = s·Bᵀ∂W and ∂B = s·∂W·Aᵀ, an expert at a time."""
    policy, plain = moved(kind, dtype=torch.float64), fresh(kind, torch.float64)
    plain.model.load_state_dict(low_rank.plain_weights(policy.model))
    weight = torch.linspace(-1, 1, len(DATA), dtype=torch.float64)
    for one in (policy, plain):
        (one.score(DATA)["logp"] * weight).sum().backward()
    found = 0
    for name, layer in low_rank.adapters(policy.model):
        if name.endswith(BOTH):
            whole: Tensor = plain.model.get_parameter(name).grad  # type: ignore[assignment]
            for mine, expected in (
                (layer.lora_A.grad, layer.scale * layer.lora_B.transpose(1, 2) @ whole),
                (layer.lora_B.grad, layer.scale * whole @ layer.lora_A.transpose(1, 2)),
            ):
                assert expected.abs().max() > 1e-6
                torch.testing.assert_close(mine, expected, rtol=1e-8, atol=1e-10)
            found += 1
    assert found == (4 if kind == "experts" else 6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["experts", "sinks"])
def test_slopes_on_a_gpu_are_those_of_the_cpu(kind: str) -> None:
    slopes = []
    for device in ("cpu", "cuda"):
        policy = moved(kind)
        policy.model.to(device)
        scores = policy.score(DATA)["logp"]
        weight = torch.linspace(-1, 1, len(DATA), device=device)
        learning = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        found = torch.autograd.grad((scores * weight).sum(), list(learning.values()))
        slopes.append({name: slope.cpu() for name, slope in zip(learning, found, strict=True)})
    for name, slope in slopes[0].items():
        assert (slopes[1][name] - slope).norm() < 1e-3 * slope.norm(), name


def test_the_policy_begins_unchanged_and_its_base_stays() -> None:
    plain = fresh("experts").score(DATA)["logp"]
    policy = add_lora(fresh("experts"), 3, settings=Lora(target_parameters=BOTH))
    torch.testing.assert_close(policy.score(DATA)["logp"], plain, rtol=1e-5, atol=1e-6)
    before, copied = begun_with(policy), None
    for _, layer in low_rank.adapters(policy.model):
        layer.lora_B.data.normal_(0, 0.2)
    low_rank.merge(policy.model)
    copied = policy.copy()
    assert not torch.allclose(policy.score(DATA)["logp"], plain, atol=1e-2)
    assert before is not None
    torch.testing.assert_close(before.score(DATA)["logp"], plain, rtol=1e-5, atol=1e-6)
    held = copied.score(DATA)["logp"].detach()
    for _, layer in low_rank.adapters(policy.model):
        layer.lora_B.data.zero_()
    low_rank.merge(policy.model)
    assert torch.equal(copied.score(DATA)["logp"], held)
    torch.testing.assert_close(policy.score(DATA)["logp"], plain, rtol=1e-5, atol=1e-6)


def in_peft(place: Path) -> Any:
    """The adapter of a folder on its base, as PEFT opens it."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    inner = transformers.AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)
    return peft.PeftModel.from_pretrained(inner, place / "adapter").eval()


@pytest.mark.parametrize("targets", [BOTH, BOTH[:1], BOTH[1:], ()], ids=["both", "first", "second", "none"])
@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "sinks"])
def test_peft_opens_what_is_written_and_what_it_writes_is_opened(
    kind: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    """With gpt-oss' published gain and limit, which transformers does not read from a config before 5.20."""
    fresh(kind).save(tmp_path / "base")
    policy = moved(kind, targets)
    save_adapter(policy, tmp_path / "adapter", tmp_path / "base")
    text = torch.randint(3, 14, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = policy.model(text)
        theirs = in_peft(tmp_path)
        torch.testing.assert_close(theirs(text).logits, expected, atol=1e-4, rtol=1e-4)
        theirs.save_pretrained(tmp_path / "again")
        again = add_lora(fresh(kind), 3, settings=Lora(target_parameters=targets, alpha=4.0))
        load_adapter(again, tmp_path / "again")
        torch.testing.assert_close(again.model(text), expected, atol=1e-4, rtol=1e-4)
        merged = load_model(tmp_path / "adapter")
        torch.testing.assert_close(merged(text), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["all sparse", "mixtral", "published sinks"])
def test_layers_may_have_adapters_on_other_tensors_than_their_neighbours(kind: str, tmp_path: Path) -> None:
    targets = tuple(
        f"model.layers.{one}" for one in ("0.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj")
    )
    fresh(kind).save(tmp_path / "base")
    policy = moved(kind, targets)
    save_adapter(policy, tmp_path / "adapter", tmp_path / "base")
    text = torch.randint(3, 14, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = policy.model(text)
        theirs = in_peft(tmp_path)
        torch.testing.assert_close(theirs(text).logits, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(load_model(tmp_path / "adapter")(text), expected, atol=1e-4, rtol=1e-4)
    named = Lora(target_parameters=targets)
    again = add_lora(fresh(kind), 3, 0, going_on(tmp_path / "adapter", 3, named), tmp_path / "adapter")
    assert torch.equal(again.model(text), policy.model(text))
    with pytest.raises(PanoplyError, match=r"lora\.target_parameters has no effect"):
        going_on(tmp_path / "adapter", 3, Lora(target_parameters=BOTH[:1]))


@pytest.mark.parametrize("kind", ["all sparse", "experts"])
@pytest.mark.parametrize("targets", [["q_proj", "gate_proj", "up_proj", "down_proj"], "all-linear"], ids=str)
def test_what_peft_makes_of_the_names_of_an_experts_matrices_is_opened(
    kind: str, targets: Any, tmp_path: Path
) -> None:
    """It gives their tensors twice the rank and twice α; `all-linear` reaches routers, which are merged alone."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    fresh(kind).save(tmp_path / "base")
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=3, target_modules=targets)
    inner = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.get_peft_model(inner, config).eval()
    text = torch.randint(3, 14, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for weight in (p for p in theirs.parameters() if p.requires_grad):
            weight += 0.1 * torch.randn_like(weight)
        expected = theirs(text).logits
    theirs.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path / "theirs")(text), expected, atol=1e-4, rtol=1e-4)
    if targets == "all-linear":
        with pytest.raises(
            PanoplyError, match=r"factors of model\.layers\.\d\.mlp\.gate, a router, with which training"
        ):
            going_on(tmp_path / "theirs", 2, Lora())
        return
    opened = add_lora(fresh(kind), 2, 0, going_on(tmp_path / "theirs", 2, Lora()), tmp_path / "theirs")
    save_adapter(opened, tmp_path / "again", tmp_path / "base")
    with torch.no_grad():
        torch.testing.assert_close(opened.model(text), expected, atol=1e-4, rtol=1e-4)
        inner = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
        again = peft.PeftModel.from_pretrained(inner, tmp_path / "again").eval()
        torch.testing.assert_close(again(text).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_run_with_adapters_on_experts_goes_on_bit_for_bit(tmp_path: Path) -> None:
    tokenizer = Chain(operations=2).tokenizer
    shape = {"width": 16, "layers": 2, "heads": 2, "max_positions": 128}
    config = DecoderConfig(tokenizer.vocab_size, model_type="qwen3_moe", mixing=Mixing(4, 2, 8), **shape)
    TextPolicy.fresh(config, tokenizer).save(tmp_path / "model")
    settings = {"lora.target_parameters": BOTH, "lora.target_modules": ("q_proj",), "run.checkpoint_every": 1}
    given: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "lora": 2,
        "settings": {**settings, "regularise.kl": 0.1},
    }
    whole = tiny.train(tmp_path / "whole", steps=3, **given)
    rows = tiny.metrics(whole.run)
    assert max(row["step0_gap"] for row in rows) < 1e-5
    assert rows[-1]["loss"] != rows[0]["loss"]

    def leave(step: pp.Step) -> None:
        if step.number == 2:
            raise LookupError

    with pytest.raises(LookupError):
        tiny.train(tmp_path / "run", on_step=leave, steps=3, **given)
    assert tiny.resume(tmp_path / "run").fingerprint == whole.fingerprint
    planned = cost(pp.plan("grpo", "chain", model=given["model"], lora=2, settings=settings))
    adapted = add_lora(
        TextPolicy.load(tmp_path / "model"),
        2,
        settings=Lora(target_parameters=BOTH, target_modules=("q_proj",)),
    )
    assert planned.trainable == sum(p.numel() for p in adapted.parameters())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target_parameters": ("mlp.experts.gate_proj",)}, "mlp.experts.gate_up_proj"),
        ({"target_parameters": BOTH, "base": "nf4"}, r"lora\.base=nf4 is not for adapters on experts"),
        ({"target_parameters": BOTH, "dora": True}, r"lora\.dora is not for adapters on experts"),
    ],
)
def test_what_cannot_be_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(PanoplyError, match=words):
        add_lora(fresh("experts"), 2, settings=Lora(**settings))


@pytest.mark.parametrize(
    ("kind", "word", "words"),
    [
        ("experts", "gate", "cannot name gate: routers get no adapters"),
        ("sinks", "router", "cannot name router: routers get no adapters"),
        ("all sparse", "gate_proj", r"lora\.target_parameters, here mlp\.experts\.gate_up_proj\."),
        ("mixtral", "w2", r"lora\.target_parameters, here mlp\.experts\.down_proj\."),
        ("mixtral", "*.experts.*", r"here mlp\.experts\.gate_up_proj and mlp\.experts\.down_proj\."),
    ],
)
def test_what_is_no_layer_of_a_model_with_experts_is_told_by_the_plan(
    kind: str, word: str, words: str, tmp_path: Path
) -> None:
    fresh(kind).save(tmp_path / "model")
    Chain().tokenizer.save(tmp_path / "model")
    with pytest.raises(PanoplyError, match=words):
        pp.plan(
            "grpo", "chain", model=str(tmp_path / "model"), lora=2, settings={"lora.target_modules": word}
        )
    with pytest.raises(PanoplyError, match=words):
        add_lora(fresh(kind), 2, settings=Lora(target_modules=(word,)))


def test_the_rank_is_that_of_layers_with_adapters_and_dora_is_not_for_some(tmp_path: Path) -> None:
    """Experts that are 4 wide allow no rank of 8, but have no adapters."""
    tokenizer = Chain(operations=2).tokenizer
    shape = {"width": 16, "layers": 2, "heads": 2, "max_positions": 128}
    config = DecoderConfig(
        tokenizer.vocab_size, model_type="qwen3_moe", mixing=Mixing(4, 2, 4), dense=(0,), **shape
    )
    TextPolicy.fresh(config, tokenizer).save(tmp_path / "model")
    given: dict[str, Any] = {"model": str(tmp_path / "model"), "lora": 8}
    pp.plan("grpo", "chain", **given, settings={"lora.target_modules": "*.layers.1.*"})
    done = tiny.train(tmp_path / "run", steps=1, **given)
    assert done.fingerprint
    with pytest.raises(
        PanoplyError, match=r"--lora 8 is more than .*experts\.down_proj allows, .*: at most 4"
    ):
        pp.plan("grpo", "chain", **given, settings={"lora.target_parameters": BOTH[1:]})
    with pytest.raises(
        PanoplyError, match=r"lora\.dora is not for gate_proj, up_proj and down_proj where other"
    ):
        pp.plan("grpo", "chain", **given, settings={"lora.dora": True})


def test_a_rank_is_no_more_than_an_expert_allows_and_experts_must_be_there() -> None:
    with pytest.raises(PanoplyError, match=r"whose experts are 32 × 20: at most 20"):
        add_lora(
            fresh("experts"), 21, settings=Lora(target_parameters=BOTH[1:], target_modules=("gate_proj",))
        )
    with pytest.raises(PanoplyError, match="the model has no experts"):
        Lora(target_parameters=BOTH).tensors({}, 2)
