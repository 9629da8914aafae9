"""The table of what fits on a GPU, as a plan prints it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import own_model
import pytest
import tiny

import panoply as pp
from panoply.costs import cost
from panoply.footprint import CARDS, SIZES
from panoply.report import fits
from panoply.report.text import planned

ANCHOR = {
    "world.longest": 512,
    "sample.prompts": 16,
    "sample.group": 8,
    "regularise": "none",
    "run.held_out": 128,
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model, and prompts of 128 of its tokens."""
    folder = tmp_path_factory.mktemp("own")
    model = own_model.write(folder / "model", template=None)
    words = pp.load_policy(model).tokenizer
    text = "Q: 2 * 3\nA: " * 200
    while len(words.encode(text)) > 128:
        text = text[:-1]
    (folder / "data.jsonl").write_text(json.dumps({"prompt": text, "answer": "6"}) + "\n")
    (folder / "reward.py").write_text("def good(completions, **_):\n    return [1.0 for _ in completions]\n")
    return {
        "model": str(model),
        "data": str(folder / "data.jsonl"),
        "reward": f"{folder / 'reward.py'}:good",
        "dtype": "bfloat16",
    }


def page(own: dict[str, Any], **choices: Any) -> str:
    """What the plan says of GPUs."""
    settings = {**ANCHOR, **choices.pop("settings", {})}
    whole = planned(pp.plan("grpo", settings=settings, **own, **choices))
    return whole.partition("what such a step takes of a GPU")[2].partition("\ndefaults without")[0]


def rows(text: str) -> dict[tuple[str, str], list[str]]:
    """Cells by size and by what learns."""
    found, size = {}, ""
    for line in text.splitlines():
        cells = re.match(r"  (\S*)\s+(all weights|--lora \d+(?:, \w+)?)  +(.+)", line)
        if cells is not None:
            size = cells[1] or size
            found[size, cells[2]] = cells[3].split()
    return found


def test_it_is_the_same_whoever_asks(own: dict[str, Any]) -> None:
    plain = page(own)
    assert page(own, lora=16) == page(own, lora=16, settings={"lora.base": "nf4"}) == plain
    assert "prompts of 128 and answers of 512 tokens" in " ".join(plain.split())


def test_it_has_adapters_of_the_rank_asked_for(own: dict[str, Any]) -> None:
    found = rows(page(own, lora=2, settings={"lora.base": "int8"}))
    assert {how for _, how in found} == {"all weights", "--lora 2", "--lora 2, int8", "--lora 2, nf4"}
    assert {how for _, how in rows(page(own))} == {"all weights", "--lora 16", "--lora 16, nf4"}


@pytest.mark.parametrize("cell", ["anchor", "lora", "lora-7b", "qlora", "1.5B"])
def test_it_says_what_was_measured(own: dict[str, Any], cell: str) -> None:
    """Within 15 %, on the largest card."""
    facts = json.loads((tiny.ROOT / "results" / "bench-gpu" / f"{cell}.json").read_text())
    base = facts.get("base", "whole")
    how = (
        f"--lora {facts['lora']}{'' if base == 'whole' else f', {base}'}"
        if facts.get("lora")
        else "all weights"
    )
    said = rows(page(own, settings={"run.micro_tokens": facts["micro_tokens"]}))[facts["model"], how]
    assert float(said[-1]) == pytest.approx(facts["peak_gb"], rel=0.15)


def table_of(made: pp.Plan) -> str:
    return planned(made).partition("what such a step takes of a GPU")[2].partition("\ndefaults without")[0]


def test_what_is_held_beside_the_policy_is_in_it() -> None:
    """A critic as large as the policy learns with an Adam of its own, whether the policy has adapters or not."""
    choices: dict[str, Any] = {"world": "chain", "model": "fresh", "dtype": "bfloat16", "device": "cpu"}
    samples = {"sample.prompts": 16, "sample.group": 8}
    alone, critic = (
        rows(table_of(pp.plan(name, settings={**samples, "regularise": "none"}, **choices)))
        for name in ("grpo", "ppo")
    )
    weights = sum(math.prod(shape) for shape in SIZES["1.5B"].values())
    for how in ("all weights", "--lora 16", "--lora 16, nf4"):
        more = float(critic["1.5B", how][-1]) - float(alone["1.5B", how][-1])
        assert more == pytest.approx(18 * weights / 1e9, abs=1.5), how


def test_selves_of_adapters_are_in_it(own: dict[str, Any]) -> None:
    """A reference that has begun as the base costs nothing; another model, or a self of another time, does."""
    kl = {"regularise": "kl", "regularise.kl": 0.1}
    found = {
        name: float(rows(page(own, settings={**kl, **more}))["7B", "--lora 16"][-1])
        for name, more in {
            "none": {"regularise.kl": 0.0, "regularise": "none"},
            "start": {},
            "other": {"run.reference": own["model"]},
            "ema": {"regularise.kl.to": "ema:0.05"},
        }.items()
    }
    assert found["start"] == found["none"]
    assert found["other"] == pytest.approx(found["none"] + 15.2, abs=1)
    assert found["ema"] == pytest.approx(found["none"] + 13.1, abs=1)


def test_a_judge_samples_nothing_and_has_no_adapters() -> None:
    made = pp.plan("reward-model", model="fresh", dtype="bfloat16", device="cpu")
    needed = cost(made)
    assert needed.peak is not None
    assert needed.peak.sampler == needed.peak.softmaxes == needed.peak.logits == 0
    text = table_of(made)
    assert {how for _, how in rows(text)} == {"all weights"}
    assert "adapters" not in text
    assert "nf4" not in text


def test_it_only_advises_what_a_plan_would_take(own: dict[str, Any]) -> None:
    def said(text: str) -> str:
        return " ".join(text.split())

    plain = said(page(own, device="cpu"))
    assert "All weights take less with --set update.bits=8 and --set run.masters=false, everything" in plain
    assert "or --set run.offload=activations." in plain
    least = {"update.bits": 8, "run.masters": False, "run.offload": "activations"}
    assert "options above. Everything takes less with shorter answers." in said(
        page(own, device="cuda", settings=least)
    )
    assert "--layout sharded" in plain
    assert "--layout sharded" not in said(page(own, device="cuda", settings=least))
    assert "bits=8" not in said(page(own, update="rmsprop"))
    assert "masters=false" not in said(page(own, update="momentum"))
    assert "activations" not in said(page(own, settings={"run.recompute": "always"}))
    critic = said(table_of(pp.plan("ppo", "chain", model="fresh", dtype="bfloat16", device="cpu")))
    assert "None of these cards has room" in critic
    assert "--layout sharded" not in critic


def test_of_a_run_that_is_spread_it_says_what_one_card_would_hold(own: dict[str, Any]) -> None:
    assert "were all of the run on one card" in " ".join(page(own, samplers=2).split())
    assert "were all" not in page(own)


def test_without_a_gpu_it_has_cards_of_common_sizes(own: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(fits, "device_memory", lambda _: None)
    said = " ".join(page(own).split())
    assert "no GPU is here, so these are cards of common sizes" in said
    assert "the plan is for a CPU, so these are cards" in " ".join(page(own, device="cpu").split())
    assert all(f"{card} GB" in said for card in CARDS)
    assert "None of these cards has room for: all weights of 7B, 14B. Several GPUs" in said
    assert not {("7B", "all weights"), ("14B", "all weights")} & rows(page(own)).keys()


def test_a_gpu_that_is_here_is_the_only_one(own: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(fits, "device_memory", lambda _: 24 * 10**9)
    text = page(own)
    assert "24 GB here" in text
    assert "no GPU" not in text
    assert all(len(cells) == 1 for cells in rows(text).values())
    assert "The GPU here has no room for: all weights of 1.5B, 3B, 7B, 14B" in " ".join(text.split())


def test_several_learners_have_no_table() -> None:
    assert "takes of a GPU" not in planned(pp.plan("relift", dtype="bfloat16", device="cpu"))


def test_readme_says_what_the_table_says(own: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(fits, "device_memory", lambda _: None)
    found = rows(page(own))
    text = (Path(tiny.ROOT) / "README.md").read_text()
    listed = re.findall(r"^\| (\d+) GB \| (.*) \| (.*) \| (.*) \|$", text, re.M)
    assert [int(card) for card, *_ in listed] == list(CARDS)
    ways = ("all weights", "--lora 16", "--lora 16, nf4")
    for at, (_, *cells) in enumerate(listed):
        for how, cell in zip(ways, cells, strict=True):
            fitting = [size for size in SIZES if found.get((size, how), ["–"] * 9)[at] != "–"]
            assert cell.split(" (")[0] == (fitting[-1] if fitting else "–")
