"""Low-rank adapters: they alone learn, a killed run goes on with them, the saved model stands alone."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Notes

import panoply as pp
from panoply.costs import cost
from panoply.errors import PanoplyError
from panoply.lora import Lora
from panoply.policies import fused
from panoply.policies.decoder import DecoderConfig
from panoply.policies.lora import add_lora, load_adapter, save_adapter
from panoply.policies.text import TextPolicy
from panoply.policies.tokenizer import Tokenizer
from panoply.progress import Progress
from panoply.report.text import planned
from panoply.rollout.graphs import addresses
from panoply.run import Run

SETTINGS: dict[str, Any] = {
    "world.operations": 2,
    "data.batch": 8,
    "run.held_out": 8,
    "run.checkpoint_every": 1,
}


def train(folder: Path, method: str = "sft", **more: Any) -> pp.Trained:
    choices: dict[str, Any] = {
        "steps": 3,
        "lora": 2,
        "model": "fresh",
        "threads": 1,
        "settings": {**SETTINGS, **more},
    }
    return pp.train(method, "chain", run=folder, progress=Progress(), **choices)


def test_only_adapters_move_and_the_export_is_merged(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    result = train(tmp_path / "run")
    first, *_, last = sorted((result.run / "checkpoints").glob("step-*"))
    before, after = pp.load_policy(first / "model"), pp.load_policy(last / "model")
    moved = {
        name
        for (name, a), (_, b) in zip(before.named_parameters(), after.named_parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert moved
    assert all("_proj" in name for name in moved)
    assert (last / "adapter" / "adapter_model.safetensors").is_file()
    assert json.loads((last / "adapter" / "adapter_config.json").read_text())["r"] == 2


def test_a_run_with_adapters_resumes_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    whole = train(tmp_path / "whole", **{"run.keep": 9})
    cut = tmp_path / "cut"
    shutil.copytree(whole.run, cut)
    (cut / "result.json").unlink()
    for folder in (cut / "checkpoints").glob("step-*"):
        if int(folder.name[5:]) > 1:
            shutil.rmtree(folder)
    assert pp.train(resume=cut, progress=Progress()).fingerprint == whole.fingerprint
    assert Run.open(cut).status() == "finished"


def test_a_negative_rank_is_refused() -> None:
    with pytest.raises(PanoplyError, match=r"run\.lora must be from 0 to"):
        pp.plan("grpo", lora=-1)
    for name in ("reward-model", "ilql", "mc-returns"):
        with pytest.raises(PanoplyError, match="--lora has no effect"):
            pp.plan(name, lora=2)


@pytest.mark.parametrize("dora", [False, True])
def test_a_model_that_fills_in_masks_keeps_to_that_with_adapters(dora: bool, tmp_path: Path) -> None:
    """Its reference, too: the KL term of a first step is 0."""
    if dora:
        pytest.importorskip("peft")
    settings = {"regularise.kl": 0.1, "reward.name": "places", "sample.prompts": 4, "sample.group": 8}
    settings |= {"run.held_out": 2, "run.device": "cpu", "update.lr": 1e-2, "lora.dora": dora}
    done = pp.train(
        "bgpo",
        model="fresh",
        lora=2,
        steps=2,
        run=tmp_path,
        settings=settings,
        progress=Progress(),
        threads=1,
    )
    first, second = (abs(row["kl"]) for row in Run.open(done.run).metrics())
    assert first < 1e-6 < second


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A model that transformers runs, with the tokenizer of the world `chain`."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from panoply.registry import find

    world = find("world", "chain").build()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=world.tokenizer.vocab_size, n_embd=16, n_layer=1, n_head=2, n_positions=256,
        eos_token_id=world.tokenizer.eos_id, bos_token_id=None,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    world.tokenizer.save(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_adapters_of_a_model_that_transformers_runs(gpt2: Path, tmp_path: Path) -> None:
    """They alone learn, the run says that it is slower and resumes bit for bit, and PEFT opens what was saved."""
    import peft
    import transformers

    notes = Notes()
    choices: dict[str, Any] = {"steps": 2, "lora": 2, "model": str(gpt2), "threads": 1, "settings": SETTINGS}
    whole = pp.train("sft", "chain", run=tmp_path / "run", progress=notes, **choices)
    assert "'gpt2' runs through transformers: on a GPU it is sampled from in captured graphs" in notes.said[0]
    first, *_, last = sorted((whole.run / "checkpoints").glob("step-*"))
    before, after = (pp.load_policy(step / "model", "cpu").model for step in (first, last))
    moved = {
        n for (n, a), b in zip(before.named_parameters(), after.parameters(), strict=True) if not a.equal(b)
    }
    assert moved
    assert all(name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) for name in moved)
    base = transformers.AutoModelForCausalLM.from_pretrained(gpt2)
    text = torch.tensor([[3, 4, 5, 6]])
    adapted = peft.PeftModel.from_pretrained(base, str(last / "model")).eval()
    torch.testing.assert_close(adapted(text).logits, after(text), atol=1e-5, rtol=1e-5)
    shutil.copytree(whole.run, tmp_path / "cut")
    (tmp_path / "cut" / "result.json").unlink()
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / last.name)
    assert pp.train(resume=tmp_path / "cut", progress=Progress()).fingerprint == whole.fingerprint


def test_adapters_of_peft_begin_alike_on_threads_that_make_them_together(gpt2: Path) -> None:
    """As learners of `--cluster threads` do: PEFT draws from a generator that they share."""

    def begun(_: int) -> str:
        return add_lora(TextPolicy.load(gpt2), 4).fingerprint()

    with ThreadPoolExecutor(4) as threads:
        assert {*threads.map(begun, range(24))} == {begun(0)}


def test_an_adapter_that_is_not_the_policys_or_not_finite(gpt2: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    policy = add_lora(TextPolicy.load(gpt2), 2)
    save_adapter(policy, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(file)
    name = sorted(weights)[0]
    for spoilt, sentence in (
        ({**weights, name: weights[name] * float("nan")}, f"not finite: {name} holds nan"),
        ({n: w for n, w in weights.items() if n != name}, f"lack {name}"),
        ({**weights, name: weights[name][:1]}, f"{name} is .*, not"),
    ):
        save_file(spoilt, file)
        with pytest.raises(PanoplyError, match=sentence):
            load_adapter(policy, tmp_path / "adapter")


def theirs(gpt2: Path, folder: Path, **said: Any) -> tuple[Path, torch.Tensor]:
    """An adapter that PEFT made on the model, and what it says that the two say."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = peft.LoraConfig(
        **{"r": 2, "lora_alpha": 6, "target_modules": ["c_attn", "c_proj"], "task_type": "CAUSAL_LM", **said}
    )
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(gpt2), config)
    with torch.no_grad():
        for weight in (p for p in model.parameters() if p.requires_grad):
            weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    with torch.no_grad():
        opened = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()
        return folder, opened(torch.tensor([[3, 4, 5, 6]])).logits


@pytest.mark.parametrize(
    "said",
    [
        {"alpha_pattern": {"c_proj": 32}},
        {"rank_pattern": {"c_proj": 4}, "use_rslora": True},
        {"init_lora_weights": "pissa"},
        {"bias": "lora_only"},
        {"lora_bias": True},
    ],
    ids=lambda said: "-".join(map(str, said.values())),
)
def test_training_goes_on_with_all_that_a_folder_of_peft_says(
    said: dict[str, Any], gpt2: Path, tmp_path: Path
) -> None:
    """With the adapter itself, and without --lora with every weight: both begin as what PEFT opens."""
    folder, expected = theirs(gpt2, tmp_path / "theirs", **said)
    for name, lora in (("on", 2), ("whole", 0)):
        done = pp.train(
            "sft", "chain", run=tmp_path / name, progress=Progress(), steps=1, lora=lora or None,
            model=str(folder), threads=1, settings={**SETTINGS, "update.lr": 1e-12},
        )  # fmt: skip
        found = pp.load_policy(done.run, "cpu", which="last").model(torch.tensor([[3, 4, 5, 6]])).detach()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"modules_to_save": ["ln_f"]}, r'modules_to_save=\["ln_f"\], with which training cannot go on: leave --lora'),
        ({"init_lora_weights": "mica"}, 'init_lora_weights="mica", with which training cannot'),
        ({"target_modules": ["c_attn", "wte"]}, "has factors of transformer.wte, a table of tokens, with which"),
    ],
    ids=["saved", "frozen", "table"],
)  # fmt: skip
def test_what_training_cannot_go_on_with_is_told_by_the_plan(
    said: dict[str, Any], sentence: str, gpt2: Path, tmp_path: Path
) -> None:
    folder, _ = theirs(gpt2, tmp_path / "theirs", **said)
    with pytest.raises(PanoplyError, match=sentence):
        pp.plan("sft", "chain", model=str(folder), lora=2)


def test_an_adapter_that_is_more_than_weights_is_not_merged(gpt2: Path, tmp_path: Path) -> None:
    """Of two tables that are one in the model it changes one."""
    folder, _ = theirs(gpt2, tmp_path / "theirs", target_modules=["c_attn", "wte"])
    with pytest.raises(PanoplyError, match="cannot be merged into its base: it changes one of two tables"):
        TextPolicy.load(folder)


def test_few_bits_are_not_for_a_model_that_transformers_runs(gpt2: Path) -> None:
    with pytest.raises(
        PanoplyError, match=r"lora\.base=nf4 is for layouts that run natively, and 'gpt2' runs"
    ):
        pp.plan("sft", "chain", model=str(gpt2), lora=2, settings={"lora.base": "nf4"})


def test_a_model_that_transformers_runs_is_a_beginning_of_others(gpt2: Path) -> None:
    policy = add_lora(TextPolicy.load(gpt2), 2)
    text, apart = torch.tensor([[3, 4, 5, 6]]), policy.apart()
    torch.testing.assert_close(apart.model(text), policy.model(text), atol=1e-6, rtol=1e-5)
    assert all(p.requires_grad for p in apart.model.parameters())
    assert not [name for name, _ in apart.named_parameters() if "lora_" in name]


def test_the_plan_counts_the_adapters_of_a_model_that_transformers_runs(gpt2: Path) -> None:
    made = pp.plan("sft", "chain", model=str(gpt2), lora=2)
    policy = add_lora(TextPolicy.load(gpt2), 2)
    assert cost(made).trainable == sum(p.numel() for p in policy.parameters())
    assert "runs through transformers" in planned(made)


def test_a_model_and_its_base_leave_each_others_weights_where_they_are() -> None:
    """Weights of layers that share their input are joined in each of the two; graphs and joints are made for places."""
    words = Tokenizer.of_characters("abcd")
    config = DecoderConfig(words.vocab_size, width=32, layers=2, heads=4, kv_heads=2, inner=64, tied=True)
    policy = add_lora(TextPolicy.fresh(config, words), 2, settings=Lora(target_modules=("q_proj", "up_proj")))
    assert policy.adapted is not None
    assert policy.adapted.base is not None
    models: list[Any] = [policy.model, policy.adapted.base.model, policy.copy().model]

    def joined(model: Any) -> list[int]:
        blocks = [layers for block in model.blocks for layers in (block.self_attn.inputs, block.mlp.inputs)]
        return [joined.data_ptr() for joined, _ in map(fused.joined, blocks)]

    first = [joined(model) for model in models]
    places = [addresses(model) for model in models]
    assert [joined(model) for model in models] == first
    assert [addresses(model) for model in models] == places
