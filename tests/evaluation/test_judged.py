"""Runs judged by a protocol, and policies measured by their world."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import panoply as pp
from panoply.cli import main
from panoply.errors import PanoplyError
from panoply.evaluation.judged import Judged
from panoply.evidence import scores
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.progress import Progress
from panoply.run import Run
from panoply.worlds.control.tabular import Tabular
from panoply.worlds.measures import measures
from panoply.worlds.text.chain import Chain

pytestmark = pytest.mark.usefixtures("registries")
SMALL = {"world.size": 300, "policy.hidden": (8,), "run.steps": 3, "run.checkpoint_every": 1, "run.keep": 9}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Imitation of a noisy expert, with all of its checkpoints."""
    settings = {**SMALL, "run.held_out": 2, "run.evaluate_every": 0, "run.threads": 1}
    folder = tmp_path_factory.mktemp("judged") / "run"
    return pp.train("bc", "logged:tabular-noisy", run=folder, settings=settings, progress=Progress()).run


def test_a_protocol_judges_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def spread(judged: Judged, *, problems: int = 4, seed: int = 0) -> dict[str, dict[str, float]]:
        found = {str(step): judged.score(judged.policy(step), problems, seed) for step in judged.steps()}
        return {step: {"return": score} for step, score in found.items()}

    @pp.protocol("spread@1", judge=spread)
    def shown() -> dict[str, float]:
        """How far the checkpoints of a run lie apart."""
        return {"nothing": 0.0}

    found = pp.judge(run, "spread", settings={"problems": 2})
    assert list(found) == ["0", "1", "2", "3"]
    with pytest.raises(SystemExit):
        main(["eval", str(run), "--by", "spread", "--set", "problems=2", "--json"])
    assert json.loads(capsys.readouterr().out) == found
    for words, sentence in {
        ("--by", "spred"): "Unknown protocol 'spred'. Did you mean 'spread'?",
        (
            "--by",
            "spread",
            "--set",
            "problem=2",
        ): "Unknown setting of spread 'problem'. Did you mean 'problems'?",
        (
            "--by",
            "spread",
            "--k",
            "4",
        ): "--k has no effect with --by: a protocol is told by --set NAME=VALUE.",
        (
            "--by",
            "dataset-perspective",
        ): "'dataset-perspective' judges no runs, it only shows itself: panoply run "
        "dataset-perspective. These do: b-coder-ranking, interference, lmrl-gym, reward-fit, self-prm, "
        "sharpe-ratio-at-k, sparkle, spread, rlhf-trilemma.",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(["eval", str(run), *words])
        assert (ended.value.code, capsys.readouterr().err) == (2, f"panoply: {sentence}\n")


def test_sharpe_ratio_of_a_runs_checkpoints(run: Path) -> None:
    found = pp.judge(run, "sharpe-ratio-at-k", settings={"k": 2, "problems": 20})
    opened = Run.open(run)
    judged = Judged(opened, opened.plan().world())
    true = [judged.score(judged.policy(step), 20) for step in judged.steps()]
    for name in ("DM", "PDIS", "WPDIS"):
        assert found[name]["best"] in true
        assert found[name]["worst"] in true
        gain = max(found[name]["best"] - found["behaviour"]["best"], 0.0)
        assert found[name]["SharpeRatio@2"] == pytest.approx(
            min(gain / max(found[name]["std"], 1e-12), 100.0)
        )
    with pytest.raises(PanoplyError, match="k is from 2 to the 4 checkpoints"):
        pp.judge(run, "sharpe-ratio-at-k", settings={"k": 5})


# ------------------------------------------------------------------ what a world measures


def test_a_world_measures_by_name() -> None:
    world = Tabular("corridor", size=4, horizon=6)
    policy = ControlPolicy.fresh(world.observation, world.action, PolicySpec(hidden=(4,)), seed=1)
    chances = policy.chances(np.arange(4))
    assert chances.sum(-1) == pytest.approx(np.ones(4))
    value = world.mdp.value(chances, 1.0, 6)
    assert world.measure("value", policy) == value
    assert world.measure("regret", policy) == pytest.approx(1.0 - value)
    assert world.measure("return", policy, seed=3) == world.measure("return", policy, seed=3)
    assert world.measure("return", policy) == pytest.approx(value, abs=0.25)
    with pytest.raises(PanoplyError, match=r"Unknown measure of tabular 'regert'\. Did you mean 'regret'\?"):
        world.measure("regert", policy)


def test_a_worlds_own_measure_is_a_metric(tmp_path: Path) -> None:
    @pp.world("measured-chain@1")
    @dataclass(frozen=True)
    class MeasuredChain(Chain):
        """A chain that measures how long answers are."""

        @measures("length@K")
        def longest(self, policy: object, seed: int, k: int) -> float:
            return k * 1.5

        @property
        def start(self) -> str:
            return "chain-start"

    settings = {
        "sample.prompts": 2,
        "sample.group": 2,
        "run.held_out": 2,
        "run.evaluate_every": 0,
        "run.threads": 1,
    }
    run = pp.train(
        "grpo", "measured-chain", run=tmp_path / "r", steps=1, settings=settings, progress=Progress()
    ).run
    scores.check("world:length@4", MeasuredChain())
    scores.measure(run, ["world:length@4", "pass@2"])
    assert scores.read(run, "world:length@4", "steps", 1).value == 6.0
    for metric in ("world:lenth@4", "world:length@0", "world:length@K"):
        with pytest.raises(PanoplyError, match="Unknown measure of measuredchain"):
            scores.check(metric, MeasuredChain())
    with pytest.raises(PanoplyError, match="Unknown measure of chain 'modes'"):
        pp.compare("grpo", "rloo", world="chain", metric="world:modes", folder=tmp_path / "c")
