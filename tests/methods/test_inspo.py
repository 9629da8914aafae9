"""INSPO: draw and weights by hand, one instruction a group, revisions that are verified and counted, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import panoply as pp
from panoply.experience import Experience
from panoply.methods.agents.inspo import attributed, chances, instructed, joining
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.worlds.text.tools import INSTRUCTIONS, Tools

WORLD = Tools(easy=0.0, instructions=True)
FIRST: dict[str, Any] = {"population": [], "weights": [], "failures": [], "step": 0}


def collector(seed: int = 0) -> Collector:
    return Collector(WORLD, open_policy("start", WORLD, 0, "cpu"), seed=seed)


def letters(found: Experience) -> list[str]:
    """Of each turn's prompt, what it begins with."""
    return [WORLD.text(row[:2]) for row in found.context.ragged("tokens").tolist()]


def test_draw_and_weights_by_hand() -> None:
    """e^(½/½) to e^0 is 2.71828 to 1; a thousandth of τ makes it one choice, and a large one all alike."""
    assert chances([0.9, 0.4], 0.5).tolist() == pytest.approx([0.7310586, 0.2689414])
    assert chances([0.9, 0.4, 0.9], 1e-3).tolist() == pytest.approx([0.5, 0, 0.5])
    assert chances([0.9, 0.4], 1e6).tolist() == pytest.approx([0.5, 0.5], abs=1e-6)
    drawn, earned = np.array([0, 2, 0, 2]), np.array([1.0, 0.25, 0.5, 0.25])
    assert attributed([0.5, 0.6, 1.0], drawn, earned, 0.2) == pytest.approx([0.55, 0.6, 0.85])


def test_weights_forget() -> None:
    """What an instruction earned under an earlier policy fades: after 20 questions 1 % of it is left, at η = 0.2."""
    weights = [1.0]
    for _ in range(20):
        weights = attributed(weights, np.array([0]), np.array([0.0]), 0.2)
    assert weights[0] == pytest.approx(0.8**20)


def test_only_candidates_that_did_better_join() -> None:
    tried = [(0.3, "GG"), (0.6, "JJ"), (0.2, "GK"), (0.5, "JL")]
    assert joining(tried, [0.1, 0.5], 3) == [
        (0.6, "JJ"),
        (0.5, "JL"),
    ]  # 0.3 is what the mean of those gone is
    assert joining(tried, [0.1, 0.1], 2) == [(0.6, "JJ"), (0.5, "JL")]
    assert joining(tried, [0.9], 2) == []
    assert len(joining(tried, [], 4)) == 4


def test_a_group_has_one_instruction_which_nobody_drew() -> None:
    collect = collector()
    state, found = instructed(prompts=6, group=3, population=4)(FIRST, collect)
    said, of = letters(found), found["group"]
    by_group = {g: {said[c] for c in found["context"][of == g].tolist()} for g in of.unique().tolist()}
    assert all(len(each) == 1 for each in by_group.values())
    assert set.union(*by_group.values()) <= set(state["population"])
    assert len(set(state["population"])) == 4
    assert not torch.isin(found["action"], torch.tensor(WORLD.tokens(INSTRUCTIONS))).any()
    for said_, weight in zip(state["population"], state["weights"], strict=True):
        groups = [g for g, each in by_group.items() if each == {said_}]
        rows = found.take(torch.isin(of, torch.tensor(groups)))
        earned = float(rows["signal:success"].sum()) / (3 * len(groups)) if groups else 1.0
        assert weight == pytest.approx(0.8 * 1.0 + 0.2 * earned)
    best = rows_under(found, state["population"][0])
    assert collect.notes["under_best"] == pytest.approx(best)


def rows_under(found: Experience, instruction: str) -> float:
    """The mean success of episodes under an instruction."""
    under = torch.tensor([said == instruction for said in letters(found)])[found["context"]]
    rows = found.take(under)
    return float(rows["signal:success"].sum()) / len(rows.by("episode"))


def test_failures_are_remembered_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []

    def revised(self: Tools, instruction: str, failures: Any, rng: Any) -> str:
        read.append((instruction, failures))
        return Tools.instruction(self, rng)

    monkeypatch.setattr(Tools, "revised", revised)
    part = instructed(prompts=4, group=2, population=4, every=1, failures=2, memory=3, verify=2, candidates=1)
    collect = collector()
    state, _ = part(FIRST, collect)
    assert 0 < len(state["failures"]) <= 3
    assert all(f["text"].startswith(f["instruction"]) for f in state["failures"])
    best = state["population"][int(np.argmax(state["weights"]))]
    later, _ = part(state, collect)
    assert all(said == best for said, _ in read), "the best is rewritten"
    assert all(f in state["failures"] for _, shown in read for f in shown)
    assert {len(shown) for _, shown in read} == {2}
    assert len(later["failures"]) == 3


def test_a_revision_is_verified_counted_and_not_learned_from() -> None:
    part = instructed(prompts=2, group=2, population=4, every=5, candidates=3, verify=8, rate=1.0)
    state = {
        "population": ["GG", "GK", "JL", "LL"], "weights": [0.0, 0.0, 0.9, 0.8], "failures": [], "step": 5
    }  # fmt: skip
    collect = collector()
    asked: list[Any] = []
    play = collect.episodes

    def episodes(tasks: Any, *given: Any, **more: Any) -> Experience:
        asked.append(list(tasks))
        return play(tasks, *given, **more)

    collect.episodes = episodes  # type: ignore[method-assign]
    after, found = part(state, collect)
    assert collect.state["episodes"] == 3 * 8 + 2 * 2
    assert len(found.by("episode")) == 4
    assert collect.notes["verified"] == 24
    assert after["population"][:2] == ["JL", "LL"]
    assert len(after["population"]) == 2 + collect.notes["instructions_new"] > 2
    tried, learned = ({task.id for task in tasks} for tasks in asked)
    assert len(tried) == 8
    assert not tried & learned
    one_letter = [sum(a != b for a, b in zip("JL", new, strict=True)) for new in after["population"][2:]]
    assert set(one_letter) == {1}


def test_the_worlds_proposer_reads_failures() -> None:
    rng = np.random.default_rng(0)
    blamed = [{"instruction": "GK", "text": ""}] * 50
    new = [WORLD.revised("JJ", blamed, rng) for _ in range(200)]
    assert all(sum(a != "J" for a in each) == 1 for each in new)
    assert sum("G" in each or "K" in each for each in new) < 10
    assert {letter for each in new for letter in each} >= set("BMHDLJ")
    freely = [WORLD.revised("JJ", [], rng) for _ in range(200)]
    assert sum("G" in each or "K" in each for each in freely) > 30


def test_it_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings = {
        "sample.prompts": 2, "sample.group": 2, "sample.every": 1, "sample.verify": 4, "sample.candidates": 2,
        "run.held_out": 4,
    }  # fmt: skip
    choices: dict[str, Any] = {"world": "tools:instructed", "steps": 3, "settings": settings}
    whole = tiny.bare(tmp_path / "whole", "inspo", **choices)
    with pp.steps("inspo", run=tmp_path / "cut", threads=1, progress=tiny.Notes(), **choices) as made:
        for _ in range(2):
            next(made)
    assert tiny.resume(tmp_path / "cut").fingerprint == whole.fingerprint
    rows = tiny.metrics(tmp_path / "whole")
    assert tiny.metrics(tmp_path / "cut") == rows
    assert [row["total_episodes"] for row in rows] == [4, 4 + 8 + 4, 4 + 2 * (8 + 4)], "what verifies counts"


def test_held_out_success_under_the_best_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is careful under some letters and careless under others: 0.22 on average."""
    monkeypatch.setattr("panoply.worlds.text.tools.PROBED", 6)
    monkeypatch.setattr("panoply.worlds.text.tools.ASKED", 100)
    policy = open_policy("start", WORLD, 0, "cpu")
    assert WORLD.measure("instructed", policy, 3) > 0.35
    with pytest.raises(pp.PanoplyError, match=r"world.instructions=true"):
        Tools().measure("instructed", policy, 3)


@pytest.mark.parametrize(
    ("world", "settings", "why"),
    [
        ("tools", {}, "instructions"),
        ("tools:instructed", {"sample.keep": 1.0}, "all 7 would stay"),
        ("tools:instructed", {"sample.every": None, "sample.verify": 9}, "stay what they are"),
        ("tools:instructed", {"sample.population": 1, "sample.every": None, "sample.tau": 0.3}, "one instruction"),
        ("tools:instructed", {"sample.tau": 0.0}, "above 0"),
    ],
)  # fmt: skip
def test_refusals(world: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(pp.PanoplyError, match=why):
        pp.plan("inspo", world, settings=settings)
