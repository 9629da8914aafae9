"""What a step takes: by hand at a given pace, measured without a trace, said before a run, smaller where it is long."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import own_model
import pytest
import torch
from test_cli import Terminal
from test_cli import panoply as panoply  # the fixture
from tiny import Notes

import panoply as pp
from panoply import pace
from panoply.pace import Estimate, Pace, measure
from panoply.planning import Plan
from panoply.policies.text import TextPolicy
from panoply.progress import Progress

SIZES = {"sample.prompts": 8, "sample.group": 4, "world.longest": 64}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Choices of a run on own data with a model of one's own."""
    folder = tmp_path_factory.mktemp("own")
    model = own_model.write(folder / "model")
    (folder / "data.jsonl").write_text(
        "\n".join(f'{{"prompt": "say {i}", "completion": "a"}}' for i in range(40))
    )
    (folder / "reward.py").write_text("def short(completions):\n    return [-len(c) for c in completions]\n")
    return {
        "data": str(folder / "data.jsonl"),
        "reward": f"{folder / 'reward.py'}:short",
        "model": str(model),
        "threads": 1,
    }


def plan(own: dict[str, Any], method: str = "grpo", **settings: Any) -> Plan:
    return pp.plan(method, **own, settings={**(SIZES if method == "grpo" else {}), **settings})


def test_a_step_by_hand(own: dict[str, Any]) -> None:
    decoding = Estimate(plan(own), Pace(token=0.5, row=0.01, read=0.0, learned=0.0)).step()
    assert (decoding.answers, decoding.length, decoding.learning) == (32, 64, 0)
    assert decoding.sampling == pytest.approx(64 * (0.5 + 32 * 0.01))
    waves = Estimate(plan(own, **{"sample.prompts": 256}), Pace(0.5, 0.01, 0, 0)).step()
    assert waves.sampling == pytest.approx(64 * (2 * 0.5 + 1024 * 0.01))
    prompt = len(plan(own).world().task("train", 0).prompt)  # type: ignore[union-attr]
    reading = Estimate(plan(own), Pace(0, 0, 0.25, 0)).step()
    assert reading.sampling == pytest.approx(8 * prompt * 0.25)
    learning = Estimate(plan(own, regularise="none"), Pace(0, 0, 0, 1e-3)).step()
    assert learning.learning == pytest.approx(6e-3 * (8 * prompt + 32 * 64))
    twice = Estimate(plan(own, **{"regularise": "none", "update.epochs": 2}), Pace(0, 0, 0, 1e-3)).step()
    assert twice.learning == pytest.approx(2 * learning.learning)


def test_smaller_settings_are_short_enough_and_can_be_planned(own: dict[str, Any]) -> None:
    slow = Pace(token=0.1, row=0.05, read=0.0, learned=1e-3)
    estimate = Estimate(plan(own), slow)
    assert estimate.step().seconds > pace.LONG
    smaller = estimate.smaller()
    assert smaller.seconds <= pace.LONG
    assert 2 * smaller.seconds > pace.LONG, "no smaller than it must be"
    again = Estimate(plan(own, **smaller.settings), slow).step()
    assert again.seconds == pytest.approx(smaller.seconds)
    first, second = estimate.lines()
    assert first.startswith("A step: about ")
    assert "32 answers of up to 64 tokens" in first
    assert all(f"--set {path}={value}" in second for path, value in smaller.settings.items())
    assert len(Estimate(plan(own), Pace(0, 0, 0, 0)).lines()) == 1


def test_what_cannot_be_smaller_ends(own: dict[str, Any]) -> None:
    endless = Estimate(plan(own), Pace(1e9, 1e9, 1e9, 1e9))
    least = endless.smaller()
    assert least.settings == {"sample.prompts": 1, "sample.group": 2, "world.longest": 32}


def test_given_answers_take_learning_alone(own: dict[str, Any]) -> None:
    given = {**own, "reward": None}
    step = Estimate(pp.plan("sft", **given), Pace(1, 1, 1, 1)).step()
    assert (step.answers, step.sampling) == (0, 0)
    assert step.learning > 0
    smaller = Estimate(pp.plan("sft", **given), Pace(0, 0, 0, 60 / step.learning * 1.5)).smaller()
    assert set(smaller.settings) <= {"data.batch", "world.longest"}


def test_measuring_leaves_no_trace_in_the_policy(own: dict[str, Any]) -> None:
    policy = TextPolicy.load(own["model"])
    before, drawn = policy.fingerprint(), torch.random.get_rng_state()
    found = measure(policy, [1, 2, 3])
    assert policy.fingerprint() == before
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(p.grad is None for p in policy.parameters())
    assert found.learned > 0
    assert found.token + found.row > 0
    assert all(map(math.isfinite, (found.token, found.row, found.read, found.learned)))


def test_a_run_says_it_first_and_is_the_same_run(
    own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, choices = Notes(), {**own, "steps": 1}
    small = {"sample.prompts": 2, "sample.group": 2, "world.longest": 4, "run.held_out": 2}
    said = pp.train("grpo", run=tmp_path / "a", progress=notes, settings=small, **choices)
    assert notes.said[0].startswith("A step: about ")
    monkeypatch.setattr(pace, "worth_measuring", lambda *_, **__: False)
    silent = pp.train("grpo", run=tmp_path / "b", progress=Progress(), settings=small, **choices)
    assert said.fingerprint == silent.fingerprint


def test_a_plan_says_it_where_it_is_worth_it(
    own: dict[str, Any], panoply: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--data", own["data"], "--reward", own["reward"], "--model", own["model"]]
    code, out, _ = panoply.run("plan", "grpo", *words, "--set", "world.longest=8")
    assert code == 0
    assert "A step: about " in out.splitlines()[-1] + out.splitlines()[-3]
    code, out, err = panoply.run("plan", "grpo", *words, "--device", "cuda:999")
    assert (code, err) == (0, ""), "nothing can be measured on what is not here"
    assert "A step: about " not in out
    assert not pace.worth_measuring(pp.plan("grpo", "chain"), opened=True)
    monkeypatch.setattr(pace, "LARGE", 1000)
    assert not pace.worth_measuring(plan(own), opened=False)
    assert pace.worth_measuring(plan(own), opened=True)
