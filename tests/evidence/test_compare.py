"""Comparisons: the notation of arms and budgets, equal conditions, the cache, and runs that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forks
import pytest
import tiny

import panoply as pp
from panoply import cli
from panoply.evidence import cache, pool
from panoply.evidence.arms import Arm, Budget, default_budget
from panoply.evidence.compare import Comparison, compare, shown

SMALL: dict[str, Any] = {
    "world": "chain",
    "model": "fresh",
    "settings": {"world.operations": 2, "run.held_out": 8, "run.evaluate_every": 1},
}


class Notes(pool.Watch):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def little(method: str) -> str:
    """A method with little to do."""
    return f"{method}{',' if ':' in method else ':'}sample.prompts=2,sample.group=2"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    """Three arms, two seeds, of which one arm always fails."""
    place = tmp_path_factory.mktemp("compare")
    (place / "broken.py").write_text(
        "import os, panoply as pp\n\n"
        "@pp.part('credit', equation='A = R')\ndef deadly(experience):\n    os.kill(os.getpid(), 9)\n"
    )
    found = compare(
        f"first={little('grpo')}", little("rloo"), f"lost={little('grpo+credit=deadly')}",
        seeds=2, budget="episodes=12", workers=2, cache=place / ".cache", folder=place / "out", watch=Notes(),
        plugins=[str(place / "broken.py")], **SMALL,
    )  # fmt: skip
    return found, place


# ------------------------------------------------------------------ notation


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("grpo", ("grpo", "grpo", {}, {})),
        ("reinforce++", ("reinforce++", "reinforce++", {}, {})),
        ("grpo+credit=gigpo", ("grpo+credit=gigpo", "grpo", {"credit": "gigpo"}, {})),
        ("grpo:update.lr=1e-3", ("grpo:update.lr=1e-3", "grpo", {}, {"update.lr": "1e-3"})),
        (
            "hot=reinforce++:sample.temperature=1.2,update.lr=1e-3+reward=verdict",
            ("hot", "reinforce++", {"reward": "verdict"}, {"sample.temperature": "1.2", "update.lr": "1e-3"}),
        ),
        ("grpo:world.levels=1,2", ("grpo:world.levels=1,2", "grpo", {}, {"world.levels": "1,2"})),
    ],
)
def test_an_arm_as_it_is_written(word: str, expected: tuple[Any, ...]) -> None:
    arm = Arm.parse(word)
    assert (arm.label, arm.method, dict(arm.slots), dict(arm.settings)) == expected


@pytest.mark.parametrize("word", ["grpo:update.lr=", "grpo:lr", "grpo,x"])
def test_an_arm_that_is_none(word: str) -> None:
    with pytest.raises(pp.PanoplyError, match="METHOD:PATH=VALUE"):
        Arm.parse(word)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("episodes=20k", ("episodes", 20_000)),
        ("decisions=1_000", ("decisions", 1000)),
        ("seconds=1.5", ("seconds", 1.5)),
    ],
)
def test_a_budget_as_it_is_written(word: str, expected: tuple[str, float]) -> None:
    assert (Budget.parse(word).unit, Budget.parse(word).amount) == expected


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("episode=3", "Did you mean 'episodes'"),
        ("steps=0", "not 'steps=0'"),
        ("steps=1.5", "such as"),
        ("steps", "such"),
    ],
)
def test_a_budget_that_is_none(word: str, said: str) -> None:
    with pytest.raises(pp.PanoplyError, match=said):
        Budget.parse(word)


def test_the_default_world_is_the_methods_home() -> None:
    assert [Arm.parse(word).home() for word in ("grpo", "gigpo:update.lr=1e-3")] == ["chain", "keydoor"]


def test_the_default_budget_is_the_first_methods_episodes() -> None:
    assert default_budget(Arm.parse("grpo"), "chain") == Budget("episodes", 150 * 16 * 8)
    assert default_budget(Arm.parse("dpo"), "chain") == Budget("steps", 150), "it collects nothing"
    assert default_budget(Arm.parse("spo-tree"), "chain") == Budget("steps", 150), "its edges are no answers"


def test_budgets_as_options_of_a_run() -> None:
    of = Arm.parse("grpo").plan("chain", 3, Budget("episodes", 1000)).options
    assert (of.episodes, of.steps, of.seed, of.threads) == (1000, 8, 3, 1)
    assert Arm.parse("grpo").plan("chain", 0, Budget("seconds", 90)).options.minutes == 1.5
    dataset = Arm.parse("dpo").plan("chain", 0, Budget("steps", 10)).options
    assert (dataset.steps, dataset.evaluate_every) == (10, 1)


# ------------------------------------------------------------------ a comparison


def test_all_arms_spend_the_same_on_the_same_problems(made: tuple[Comparison, Path]) -> None:
    found, _place = made
    spent = [tiny.result(Path(f))["episodes"] for r in found.results for f in r.folders]
    assert spent == [12] * 4
    runs = [pp.run.Run.open(f) for r in found.results for f in r.folders]  # type: ignore[attr-defined]
    assert {r.plan().options.held_out for r in runs} == {8}
    assert [r.plan().options.seed for r in runs] == [0, 1, 0, 1]


def test_a_run_that_dies_is_named_and_the_others_are_kept(made: tuple[Comparison, Path]) -> None:
    found, _ = made
    assert set(found.failed) == {"lost chain s0", "lost chain s1"}
    assert "SIGKILL" in found.failed["lost chain s0"]
    assert [len(r.table()) for r in found.results] == [2, 2, 0]


def test_what_is_kept(made: tuple[Comparison, Path]) -> None:
    _found, place = made
    facts = json.loads((place / "out" / "comparison.json").read_text())
    first, second, lost = facts["arms"]
    assert (first["label"], second["method"], lost["runs"]) == ("first", "rloo@1", [])
    assert facts["budget"] == {"chain": {"episodes": 12.0}}
    assert first["scores"]["chain"].keys() == {"0", "1"}
    mean = sum(first["scores"]["chain"].values()) / 2
    assert first["iqm"] == pytest.approx(mean, abs=1e-4)
    assert "improvement" in second
    assert "improvement" not in first
    assert [x for x, _ in first["curves"]["chain"]["0"]] == [0, 4, 8, 12]
    assert first["profile"][0][0] == 0
    assert first["profile"][-1] == [1.0, 0.0]
    for picture in ("curves.svg", "profile.svg"):
        assert (place / "out" / picture).read_text().count("first") >= 1


def test_the_table(made: tuple[Comparison, Path]) -> None:
    text = shown(made[0])
    assert "IQM" in text
    assert "P(> first)" in text
    assert "every run 12 episodes" in text
    assert "Not finished: lost chain s0, lost chain s1." in text
    assert "no run has finished" in text


def test_found_again_without_computing(
    made: tuple[Comparison, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, place = made
    monkeypatch.setattr(pool, "_Worker", None)
    again = compare(
        f"first={little('grpo')}", little("rloo"),
        seeds=2, budget="episodes=12", cache=place / ".cache", folder=place / "again", **SMALL,
    )  # fmt: skip
    assert again.results[0].scores == found.results[0].scores


@pytest.mark.parametrize("spoil", ["run.json", "result.json"])
def test_a_corrupt_entry_is_made_again(made: tuple[Comparison, Path], spoil: str) -> None:
    """From its last checkpoint, where it only lacks its end."""
    found, place = made
    spoiled = Path(found.results[0].folders[1])
    (spoiled / spoil).write_text('{"steps": 3}')
    notes = Notes()
    again = compare(
        f"first={little('grpo')}", little("rloo"), watch=notes,
        seeds=2, budget="episodes=12", cache=place / ".cache", folder=place / "mended", **SMALL,
    )  # fmt: skip
    assert again.results[0].scores == found.results[0].scores
    broken = f"The cached run {spoiled.name} is broken and is made again"
    assert [broken in said for said in notes.said] == ([True] if spoil == "run.json" else [])


def test_nothing_has_finished(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import panoply as pp\n\n"
        "@pp.part('credit', equation='A = R')\ndef sad(experience):\n    raise pp.PanoplyError('It cannot be.')\n"
    )
    arms = [little("grpo+credit=sad"), f"b={little('rloo+credit=sad')}"]
    with pytest.raises(pp.PanoplyError, match="Not one run of this comparison has finished: It cannot be."):
        compare(
            *arms, seeds=1, budget="steps=2", workers=1, cache=tmp_path / "cache", folder=tmp_path / "out",
            watch=Notes(), plugins=[str(tmp_path / "broken.py")], **SMALL,
        )  # fmt: skip


# ------------------------------------------------------------------ killed and gone on with

KILLED = """
import sys
from panoply.evidence.compare import compare
compare("grpo:sample.prompts=2,sample.group=2", "rloo:sample.prompts=2,sample.group=2", seeds=1,
        budget="steps=80", workers=1, cache="cache", folder="out", world="chain", model="fresh",
        settings={"world.operations": 2, "run.held_out": 4, "run.evaluate_every": 100, "run.checkpoint_every": 10})
"""


def test_a_killed_comparison_goes_on_with_its_half_done_runs(tmp_path: Path) -> None:
    process = forks.Popen(
        [sys.executable, "-c", KILLED], cwd=tmp_path, env=tiny.environment(), stderr=subprocess.DEVNULL
    )
    half = wait_for(lambda: list(tmp_path.glob("cache/grpo*/checkpoints/step-*[1-9]*")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    folder = half[0].parent.parent
    wait_for(lambda: pp.run.Run.open(folder).status() == "stopped")  # type: ignore[attr-defined]
    before = len(tiny.metrics(folder))
    assert 0 < before < 80
    created = (folder / "run.json").read_bytes()
    done = forks.run(
        [sys.executable, "-c", KILLED], cwd=tmp_path, env=tiny.environment(), capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert tiny.result(folder)["steps"] == 80
    assert (folder / "run.json").read_bytes() == created, "the same run, not one made again"
    assert (tmp_path / "out" / "comparison.json").is_file()


def wait_for(what: Any, seconds: float = 60.0) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = what()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen")


# ------------------------------------------------------------------ the command


def run(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", *words])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["grpo"], "needs at least two methods"),
        (["grpo", "grpo"], "named twice"),
        (["grpo", "rlo"], "Did you mean 'rloo'"),
        (
            ["grpo", "rlhf", "--world", "strings"],
            "rlhf@1 is a recipe: its budget is in steps, of all stages together, or for one stage",
        ),
        (
            ["rlhf", "grpo", "--budget", "steps=200"],
            "before optimise take 250 steps, and the budget is 200 steps",
        ),
        (["rlhf", "grpo", "--budget", "judg.steps=9"], "Unknown stage of rlhf@1 that trains 'judg'"),
        (["rlhf+credit=gae", "grpo"], "is a recipe: say of which stage credit is, STAGE.credit=NAME"),
        (["grpo", "dpo"], "dpo learns from given data and collects no episodes"),
        (["grpo", "igpo"], "needs a world with 'conclusion'"),
        (["grpo", "rloo:update.rate=1"], "Unknown setting"),
        (["grpo", "rloo", "--world", "chian"], "Did you mean 'chain'"),
        (["grpo", "rloo", "--seeds", "0"], "--seeds must be at least 1"),
        (["grpo", "rloo", "--budget", "miles=3"], "Unknown unit of a budget"),
        (["grpo", "rloo", "--plugin", "none.py"], "no plug-in file"),
    ],
)
def test_bad_input_is_refused_before_any_compute(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(words, capsys)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert os.listdir(tmp_path) == []


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With workers that are started as they are for a user, and not forked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pool, "subprocess", subprocess)
    words = [
        little("grpo"),
        little("rloo"),
        "--seeds",
        "1",
        "--budget",
        "steps=2",
        "--model",
        "fresh",
        "--quiet",
    ]
    words += ["--set", "world.operations=2", "--set", "run.held_out=4", "--metric", "entropy"]
    code, out, err = run(words, capsys)
    assert (code, err) == (0, "")
    assert "entropy on chain; every run 2 steps" in out
    assert [p.name for p in sorted((tmp_path / "runs").glob("*compare*/*"))] == [
        "comparison.json", "curves.svg", "profile.svg",
    ]  # fmt: skip
    code, out, _ = run([*words, "--json"], capsys)
    assert json.loads(out)["metric"] == "entropy"
    assert len(list((tmp_path / "runs" / ".cache").glob("[!.]*"))) == 2


def test_cached_runs_are_no_runs_of_the_user(made: tuple[Comparison, Path]) -> None:
    from panoply.report.run_index import RunIndex

    assert RunIndex(made[1]).find() == []
    assert cache.finished(Path(made[0].results[0].folders[0])) is not None


# ------------------------------------------------------------------ control


def test_control_worlds_count_decisions_and_measure_returns(tmp_path: Path) -> None:
    arm = Arm.parse("ppo")
    budget = default_budget(arm, "cartpole")
    assert budget.unit == "decisions"
    options = arm.plan("cartpole", 0, budget).options
    assert options.decisions == budget.amount
    found = compare(
        "ppo:sample.envs=2,sample.length=8,update.minibatches=1", "b=ppo:sample.envs=2,sample.length=16",
        world="cartpole", seeds=1, budget="decisions=64", workers=1, watch=Notes(), cache=tmp_path / "cache",
        folder=tmp_path / "out", settings={"run.held_out": 2},
    )  # fmt: skip
    assert [tiny.result(Path(r.folders[0]))["decisions"] for r in found.results] == [64, 64]
    assert found.results[0].table()[0][0] > 1, "returns, not rates"
    assert "held-out return on cartpole; every run 64 decisions" in shown(found)


def test_returns_of_several_worlds_are_not_averaged(tmp_path: Path) -> None:
    with pytest.raises(pp.PanoplyError, match="not on one scale"):
        compare(
            "ppo",
            "b=ppo:update.lr=1e-3",
            world=["cartpole", "acrobot"],
            budget="decisions=64",
            cache=tmp_path,
        )
