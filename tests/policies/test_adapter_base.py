"""An adapter is over what it was trained over: the same weights, in as few bits, whoever opens it."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import panoply as pp
from panoply import cli
from panoply.costs import cost
from panoply.errors import PanoplyError
from panoply.loops.seat import Seat
from panoply.lora import Lora
from panoply.policies import low_rank
from panoply.policies.adapter_base import FILE, fingerprint
from panoply.policies.adapter_config import CONFIG, WEIGHTS
from panoply.policies.build import learning, open_policy
from panoply.policies.lora import add_lora, load_adapter
from panoply.policies.text import TextPolicy
from panoply.worlds.text.chain import Chain

START = tiny.ROOT / "panoply/assets/chain-start"
TOKENS = torch.tensor([[3, 4, 5, 6, 7]])
SFT = {"run.device": "cpu", "run.checkpoint_every": 1, "run.keep": 9, "update.lr": 3e-3}


@pytest.fixture(scope="module", params=["nf4", "int8"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def run(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A QLoRA run whose adapters have moved."""
    folder = tmp_path_factory.mktemp(kind) / "run"
    return tiny.train(folder, "sft", model="start", lora=2, steps=2, settings={**SFT, "lora.base": kind}).run


def trained(run: Path, kind: Any, dtype: torch.dtype = torch.float32) -> TextPolicy:
    """The policy as it was in training after its last step."""
    policy = add_lora(TextPolicy.load(START, dtype), 2, settings=Lora(base=kind))
    load_adapter(policy, sorted((run / "checkpoints").glob("step-*"))[-1] / "model")
    return policy


@torch.no_grad()
def said(policy: Any) -> Tensor:
    found: Tensor = policy.model(TOKENS)
    return found.float()


def test_whoever_opens_a_run_over_few_bits_gets_the_model_that_was_trained(
    run: Path, kind: str, tmp_path: Path
) -> None:
    expected = said(trained(run, kind))
    whole = TextPolicy.load(START)
    load_adapter(add_lora(whole, 2), sorted((run / "checkpoints").glob("step-*"))[-1] / "model")
    other = (said(whole) - expected).abs().max()
    merged = pp.export(run, tmp_path / "merged", which="last")
    alone = pp.export(run, tmp_path / "alone", which="last", adapter=True)
    assert json.loads((alone / FILE).read_text())["base"] == kind
    world = Chain(operations=2)
    for opened in (
        pp.load_policy(run, "cpu", which="last"),
        pp.load_policy(merged, "cpu"),
        pp.load_policy(alone, "cpu"),
        open_policy(str(alone), world, 0, "cpu"),
    ):
        assert (said(opened) - expected).abs().max() < 1e-4 * other


def test_in_half_precision_its_base_stays_in_few_bits(run: Path, kind: str, tmp_path: Path) -> None:
    """To the last bit what was trained, which merged weights would not be; what may learn is merged all the same."""
    folder = pp.export(run, tmp_path / "alone", which="last", adapter=True)
    opened = pp.load_policy(folder, "cpu", "bfloat16")
    assert isinstance(opened, TextPolicy)
    adapted = dict(low_rank.adapters(opened.model))
    assert all(isinstance(layer, low_rank.LowRankQuantised) for layer in adapted.values())
    assert len(adapted) == len(load_file(folder / WEIGHTS)) // 2
    assert not list(opened.parameters())
    assert torch.equal(said(opened), said(trained(run, kind, torch.bfloat16)))
    plain = learning(opened)
    assert not list(low_rank.adapters(plain.model))
    assert all(p.requires_grad for p in plain.model.parameters())
    assert 0 < (said(plain) - said(opened)).abs().max() < 0.5


def test_bits_are_those_of_the_precision_that_was_trained_in(tmp_path: Path) -> None:
    """From weights in float32 and from the same in bfloat16 some codes differ; a run in the latter has those."""
    settings = {**SFT, "lora.base": "nf4"}
    done = tiny.train(
        tmp_path / "run", "sft", model="start", lora=2, steps=1, dtype="bfloat16", settings=settings
    )
    opened = pp.load_policy(done.run, "cpu", which="last")
    expected = trained(done.run, "nf4", torch.bfloat16)
    found = dict(opened.named_parameters())
    for name, layer in low_rank.adapters(expected.model):
        whole = low_rank.merged(layer.origin.layer.weight.float(), layer.lora_A, layer.lora_B, layer.scale)
        torch.testing.assert_close(found[f"{name}.weight"], whole, rtol=0, atol=1e-6)
    merged = pp.export(done.run, tmp_path / "merged", which="last")
    assert json.loads((merged / "config.json").read_text())["dtype"] == "float32"


def test_training_goes_on_over_the_same_bits(run: Path, kind: str, tmp_path: Path) -> None:
    alone = pp.export(run, tmp_path / "alone", which="last", adapter=True)
    expected = said(trained(run, kind))
    for settings in ({}, {"lora.base": kind}, {"lora.alpha": 4, "lora.base": kind}):
        plan = pp.plan("sft", model=str(alone), lora=2, settings={"run.device": "cpu", **settings})
        seat = Seat(plan, plan.world())
        assert torch.equal(said(seat.policy), expected)
        assert "adapted layers in few bits" in cost(plan).memory_bytes
    done = tiny.train(tmp_path / "on", "sft", model=str(alone), lora=2, steps=1, settings=SFT)
    first, last = sorted((done.run / "checkpoints").glob("step-*"))
    torch.testing.assert_close(said(pp.load_policy(first, "cpu")), expected, atol=1e-4, rtol=1e-4)
    assert json.loads((last / "model" / FILE).read_text())["base"] == kind
    whole = tiny.train(tmp_path / "whole", "sft", model=str(alone), steps=1, settings=SFT)
    torch.testing.assert_close(said(whole.policy(which=0)), expected, atol=1e-4, rtol=1e-4)


def test_a_run_over_few_bits_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings = {**SFT, "lora.base": "nf4"}
    whole = tiny.train(tmp_path / "whole", "sft", model="start", lora=2, steps=3, settings=settings)
    shutil.copytree(whole.run, tmp_path / "cut")
    (tmp_path / "cut" / "result.json").unlink()
    for step in (2, 3):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"step-000000{step}")
    assert tiny.resume(tmp_path / "cut").fingerprint == whole.fingerprint


def test_a_base_of_other_precision_has_other_bits_and_is_refused(run: Path, kind: str) -> None:
    with pytest.raises(PanoplyError, match=f"trained over {kind} of float32, .*: go on with --dtype float32"):
        pp.plan("sft", model=str(run), lora=2, dtype="bfloat16")
    pp.plan("sft", model=str(run), lora=2, dtype="float32")
    pp.plan("sft", model=str(run), dtype="bfloat16")  # merged, from what it was trained over


def test_a_base_of_other_bits_is_refused_before_anything_runs(run: Path, kind: str) -> None:
    for other in {"whole", "int8", "nf4"} - {kind}:
        with pytest.raises(
            PanoplyError, match=rf"lora\.base cannot be {other}: .* over a base that is in {kind}"
        ):
            pp.plan("sft", model=str(run), lora=2, settings={"lora.base": other})
    with pytest.raises(PanoplyError, match=r"lora\.target_modules has no effect: the adapter in"):
        pp.plan("sft", model=str(run), lora=2, settings={"lora.target_modules": "q_proj"})


def test_export_says_what_peft_makes_of_it(
    run: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    with pytest.raises(SystemExit):
        cli.main(["export", str(run), str(tmp_path / "alone"), "--adapter", "--which", "last"])
    written = capsys.readouterr().out
    assert f"It was trained over its base in {kind}" in written
    assert f"export it merged: panoply export {run} DIR" in written
    with warnings.catch_warnings(record=True) as heard:
        opened = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "alone").eval()
    assert not [w for w in heard if "nexpected" in str(w.message) or "adapter" in str(w.message)]
    whole = TextPolicy.load(START)
    load_adapter(add_lora(whole, 2), tmp_path / "alone")
    with torch.no_grad():
        torch.testing.assert_close(opened(TOKENS).logits, said(whole), atol=1e-4, rtol=1e-4)
    merged = pp.export(run, tmp_path / "merged", which="last")
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()(TOKENS).logits
    torch.testing.assert_close(theirs, said(trained(run, kind)), atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------ recipes

RLHF: dict[str, Any] = {
    "imitate.run.steps": 1, "judge.run.steps": 1, "optimise.run.steps": 1, "run.held_out": 4, "run.device": "cpu",
    "imitate.data.batch": 4, "imitate.run.lora": 2, "optimise.run.lora": 2,
}  # fmt: skip


def test_stages_of_a_recipe_go_on_over_the_same_bits(tmp_path: Path) -> None:
    settings = {**RLHF, "imitate.lora.base": "nf4", "optimise.lora.base": "nf4"}
    done = tiny.bare(tmp_path / "rlhf", "rlhf", settings=settings)
    folders = sorted((done.run / "checkpoints").glob("step-*/model"))
    assert [json.loads((f / FILE).read_text())["base"] for f in folders] == ["nf4"] * len(folders)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"optimise.lora.base": "nf4"}, r"Stage optimise .*: lora\.base cannot be nf4: the adapter of stage imitate"),
        ({"imitate.lora.base": "nf4", "optimise.lora.base": "whole"}, r"lora\.base cannot be whole"),
        ({"optimise.run.lora": 4}, "The adapter of stage imitate has rank 2: go on with it by --lora 2"),
        ({"imitate.lora.alpha": 3, "optimise.lora.alpha": 4}, r"lora\.alpha has no effect: the adapter of stage"),
    ],
)  # fmt: skip
def test_stages_that_do_not_agree_are_refused_by_the_plan(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        pp.plan_recipe("rlhf", settings={**RLHF, **settings})


def test_stages_that_say_the_same_or_start_anew_are_planned() -> None:
    same = {"imitate.lora.alpha": 4, "optimise.lora.base": "nf4", "imitate.lora.base": "nf4"}
    pp.plan_recipe("rlhf", settings={**RLHF, **same})
    pp.plan_recipe("rlhf", settings={**RLHF, "optimise.run.lora": 4}, model="fresh")


# ------------------------------------------------------------------ another base


@pytest.fixture
def base(tmp_path: Path) -> Path:
    shutil.copytree(START, tmp_path / "base")
    return tmp_path / "base"


def change(folder: Path) -> None:
    """Other weights of the same shapes."""
    weights = load_file(folder / "model.safetensors")
    save_file({n: w * 1.01 for n, w in weights.items()}, folder / "model.safetensors")


def test_a_fingerprint_is_of_names_types_shapes_and_numbers(base: Path, tmp_path: Path) -> None:
    weights = load_file(base / "model.safetensors")
    first = sorted(weights)[0]
    found = {fingerprint(base)}
    for other in (
        {n: w * 1.01 for n, w in weights.items()},
        {n: w if n != first else w + 1e-3 for n, w in weights.items()},
        {n: w.half() for n, w in weights.items()},
        {n if n != first else f"{n}x": w for n, w in weights.items()},
        {n: w if n != first else w.t().contiguous() for n, w in weights.items()},
    ):
        save_file(other, base / "model.safetensors")
        found.add(fingerprint(base))
    assert len(found) == 6
    TextPolicy.load(START).save(tmp_path / "again")
    assert fingerprint(tmp_path / "again") == fingerprint(START)
    (base / "model.safetensors").write_bytes((START / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(PanoplyError, match="is corrupt or cut short"):
        fingerprint(base)


@pytest.mark.parametrize("settings", [{}, {"lora.dora": True}], ids=["native", "peft"])
def test_another_base_of_the_same_shapes_is_told(
    settings: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    if settings:
        pytest.importorskip("peft")
    done = tiny.train(tmp_path / "run", "sft", model=str(base), lora=2, steps=2, settings={**SFT, **settings})
    adapter = pp.export(done.run, tmp_path / "adapter", which="last", adapter=True)
    mark = fingerprint(base)
    change(base)
    sentence = (
        rf"was trained over other weights than those in .*base: its base has the fingerprint {mark}, and"
    )
    (done.run / "result.json").unlink()
    shutil.rmtree(done.run / "checkpoints" / "step-0000002")
    for ask in (
        lambda: pp.load_policy(done.run, which="last"),
        lambda: pp.sample(adapter, "3+4"),
        lambda: pp.evaluate(done.run, which="last"),
        lambda: pp.export(done.run, tmp_path / "out", which="last"),
        lambda: pp.export(done.run, tmp_path / "out", which="last", adapter=True),
        lambda: pp.plan("sft", model=str(adapter), lora=2),
        lambda: tiny.resume(done.run),
    ):
        with pytest.raises(PanoplyError, match=sentence):
            ask()
    written = json.loads((adapter / FILE).read_text())
    (adapter / FILE).write_text(json.dumps({**written, "fingerprint": ""}))
    pp.load_policy(adapter)


def test_an_adapter_of_which_nothing_is_known_opens_over_what_it_names(base: Path, tmp_path: Path) -> None:
    """Those of PEFT, and of runs before fingerprints; the bits under them can be chosen."""
    done = tiny.train(tmp_path / "run", "sft", model=str(base), lora=2, steps=1, settings=SFT)
    adapter = pp.export(done.run, tmp_path / "adapter", which="last", adapter=True)
    (adapter / FILE).unlink()
    change(base)
    pp.load_policy(adapter)
    plan = pp.plan("sft", model=str(adapter), lora=2, settings={"lora.base": "nf4", "run.device": "cpu"})
    policy: Any = Seat(plan, plan.world()).policy
    assert all(isinstance(layer, low_rank.LowRankQuantised) for _, layer in low_rank.adapters(policy.model))
    assert json.loads((adapter / CONFIG).read_text())["r"] == 2
