"""Trained here, judged there: `run.held_out_world`."""

from __future__ import annotations

from pathlib import Path

import pytest

import panoply as pp
from panoply.errors import PanoplyError
from panoply.planning import named_world
from panoply.progress import Progress
from panoply.report.text import trained
from panoply.run import Run

SMALL = {"sample.prompts": 2, "sample.group": 2, "run.held_out": 8, "run.evaluate_every": 1, "run.threads": 1}


def test_a_run_is_judged_in_another_world_too(tmp_path: Path) -> None:
    settings = {**SMALL, "run.held_out_world": "chain:operations=3,levels=0,1"}
    result = pp.train("grpo", "chain", run=tmp_path / "run", steps=1, settings=settings, progress=Progress())
    plain = pp.train("grpo", "chain", run=tmp_path / "plain", steps=1, settings=SMALL, progress=Progress())
    assert result.fingerprint == plain.fingerprint, "being judged changes nothing of what is learned"

    there = result.after["elsewhere"]
    measured = pp.evaluate(
        result.run,
        which="last",
        problems=8,
        attempts=1,
        settings={"world.operations": 3, "world.levels": (0, 1)},
    )
    assert there["world"] == "chain:operations=3,levels=0,1"
    assert (there["greedy"], there["sampled"]) == (measured.greedy, measured.sampled)
    assert {k: v for k, v in result.after.items() if k != "elsewhere"} == plain.after

    opened = Run.open(result.run)
    stored = opened.result()
    assert stored is not None
    assert stored["before"]["elsewhere"]["problems"] == 8
    assert opened.metrics()[0]["elsewhere_sampled"] == there["sampled"]
    before = stored["before"]["elsewhere"]["sampled"]
    assert f"sampled, in chain:operations=3,levels=0,1  {before:.3f}   →  {there['sampled']:.3f}" in trained(
        result
    )


@pytest.mark.parametrize(
    ("method", "world", "words", "sentence"),
    [
        ("grpo", "chain", "chian", "Unknown world 'chian'. Did you mean 'chain'?"),
        ("grpo", "chain", "chain:operation=3", "Unknown setting of world chain 'operation'."),
        ("grpo", "chain", "chain", "run.held_out_world has no effect: chain is the world of the run itself."),
        (
            "grpo",
            "chain",
            "add",
            "its alphabet is another than that of chain, so the policy cannot act there.",
        ),
        ("grpo", "chain", "cartpole", "its kind is another than that of chain"),
        ("ppo", "cartpole", "acrobot", "its observation is another than that of cartpole"),
        (
            "reward-model",
            "strings",
            "strings:noise=0.5",
            "run.held_out_world has no effect: a judge is trained",
        ),
    ],
)
def test_where_a_policy_cannot_be_judged(method: str, world: str, words: str, sentence: str) -> None:
    with pytest.raises(PanoplyError) as refused:
        pp.plan(method, world, settings={"run.held_out_world": words})
    assert sentence in str(refused.value)


def test_a_name_with_a_colon_is_a_name() -> None:
    assert named_world("logged:cartpole-random:size=70").size == 70
