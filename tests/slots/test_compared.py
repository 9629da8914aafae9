"""Annotators who are asked about the policy's own answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import panoply as pp
from panoply.batch import Batch, Values
from panoply.errors import PanoplyError
from panoply.methods.base.grpo import grpo
from panoply.parts import part
from panoply.planning import make_plan
from panoply.policies.build import open_policy
from panoply.progress import Progress
from panoply.report.text import planned
from panoply.rollout.text import Collector
from panoply.slots.data.preferences import preferences
from panoply.slots.reward.raters import seen
from panoply.slots.reward.signals import signal
from panoply.slots.sample.annotated import annotated
from panoply.slots.sample.answers import answers_of
from panoply.slots.sample.compared import compared
from panoply.worlds.text.strings import Strings


@part(
    "surrogate",
    equation="−(h − 1/(2·{eta}))²",
    unit="pair",
    needs={"logp@reference", "logp@old"},
    scores="policy",
)
def toy_mirror_descent(batch: Batch, *, eta: float = 2.0, tau: float = 0.5) -> Values:
    """A step of self-play: h is the pair's log-ratio to π_ref^(τ/η)·π_t^(1−τ/η), and the target a constant."""
    share = tau / eta
    near = share * batch.episode_log_ratio("reference") + (1 - share) * batch.episode_log_ratio("old")
    chosen, rejected = batch.pair_rows(near)
    return -((chosen - rejected - 1 / (2 * eta)) ** 2), {"margin": (chosen - rejected).detach()}


def test_a_method_of_self_play(tmp_path: Path) -> None:
    """The margin between preferred and other answers begins at 0 and grows towards 1/(2η)."""
    method = grpo().but(
        sample=compared(prompts=8, group=4),
        reward=signal(name="wins"),
        surrogate=toy_mirror_descent(),
        regularise=(),
    )
    settings = {"run.held_out": 4, "update.epochs": 4, "run.device": "cpu"}
    done = tiny.bare(tmp_path / "run", method, world="strings", settings=settings, steps=1)
    margin = tiny.metrics(done.run)[0]["margin"]
    assert 0 < margin < 0.25


def test_opponents_may_be_a_snapshot(tmp_path: Path) -> None:
    """Every pair has one answer of the policy and one of its reference, to the same prompt."""
    sample = compared(prompts=4, group=2, against="reference")
    method = grpo().but(sample=sample, surrogate=toy_mirror_descent(), regularise=())
    settings = {"run.held_out": 4, "run.device": "cpu", "reward.name": "wins"}
    steps = pp.steps(
        method, "strings", run=tmp_path / "run", settings=settings, steps=1, threads=1, progress=Progress()
    )
    (found,) = [step.experience for step in steps]
    assert found.pairs is not None
    actor = found.by("episode").first(found["actor"])
    task = found.by("episode").first(found["task"])
    chosen, rejected = Batch(found, {}).pair_rows(torch.stack([actor, task], 1))
    assert len(chosen) == 8
    assert bool((chosen[:, 0] + rejected[:, 0] == 1).all())
    assert torch.equal(chosen[:, 1], rejected[:, 1])


@pytest.fixture(scope="module")
def collect() -> Collector:
    world = Strings(sharpness=1.0)
    return Collector(world, open_policy("start", world, 0, "cpu"), seed=3)


@pytest.mark.parametrize("asked", ["once", "all"])
@pytest.mark.parametrize("soft", [False, True])
def test_wins_are_counted(collect: Collector, asked: Any, soft: bool) -> None:
    found = compared(prompts=3, group=5, asked=asked, soft=soft)(collect)
    world, pairs = collect.world, found.pairs
    assert pairs is not None
    assert pairs.rows == 3 * (2 if asked == "once" else 10)
    episodes = found.by("episode")
    said = dict(zip(episodes.keys.tolist(), answers_of(found), strict=True))
    group = dict(zip(episodes.keys.tolist(), episodes.first(found["group"]).tolist(), strict=True))
    problem = dict(zip(episodes.keys.tolist(), episodes.first(found["task"]).tolist(), strict=True))
    tasks = {t.id: t for t in (world.task("train", i) for i in range(400))}
    score: dict[int, list[float]] = {e: [] for e in said}
    sides = [pairs.tensor(name).tolist() for name in ("chosen", "rejected")]
    for row, (a, b) in enumerate(zip(*sides, strict=True)):
        assert group[a] == group[b]
        assert a != b
        p = 1.0
        if soft:
            p = float(pairs.tensor("p")[row])
            assert p == pytest.approx(world.preference(tasks[problem[a]], said[a], said[b]))
            assert p >= 0.5
        score[a].append(p)
        score[b].append(1 - p)
    expected = [sum(s) / len(s) if s else 0.5 for s in score.values()]
    assert episodes.sum(found["signal:wins"]).tolist() == pytest.approx(expected)
    assert bool((found["signal:wins"][~episodes.is_last()] == 0).all())


def test_the_preferred_answer_stands_first() -> None:
    """Annotators who never err: whoever is chosen is worth at least as much."""
    world = Strings(sharpness=1e6)
    found = compared(prompts=4, group=4)(Collector(world, open_policy("start", world, 0, "cpu"), seed=1))
    assert found.pairs is not None
    worth = found.by("episode").sum(found["signal:true"])
    chosen, rejected = Batch(found, {}).pair_rows(worth)
    assert bool((chosen >= rejected).all())
    assert bool((chosen > rejected).any())


def test_it_is_refused_where_nobody_prefers() -> None:
    sample: Any = compared()
    with pytest.raises(PanoplyError, match="needs a world with 'prefer', and keydoor@1 has none"):
        make_plan("grpo", "keydoor", slots={"sample": sample})
    with pytest.raises(PanoplyError, match="another one to be compared with"):
        make_plan(
            "grpo", "strings", slots={"sample": compared(group=1)}, settings={"credit.baseline": "none"}
        )
    plan = make_plan("grpo", "strings", slots={"sample": sample}, settings={"reward.name": "wins"})
    assert plan.method.settings()["reward.name"] == "wins"


def test_the_same_questions_have_the_same_answers() -> None:
    world = Strings()
    policy = open_policy("start", world, 0, "cpu")
    found = [compared(prompts=2, group=4)(Collector(world, policy, seed=5)).pairs for _ in range(2)]
    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0].tensor("chosen"), found[1].tensor("chosen"))


def test_a_plan_says_that_a_reward_of_steps_cannot_hold_a_circle_of_raters() -> None:
    def said(method: str, **raters: Any) -> str:
        asked = annotated(prompts=32, group=1, against="batch", **raters)
        return planned(make_plan(method, "cartpole", slots={"sample": asked}))

    three = {"second": seen(dim=0), "third": seen(dim=1)}
    assert "three raters may prefer in a circle" in said("preference-ppo", **three)
    assert "circle" not in said("preference-ppo", second=seen(dim=0))
    assert "circle" not in said("spo-minimax", **three)


def test_a_plan_says_that_one_number_cannot_hold_a_circle() -> None:
    """Intransitive preferences for a reward model are allowed, and noted."""

    def said(**choices: Any) -> str:
        return planned(make_plan("reward-model", "strings", **choices))

    slots: Any = {"data": preferences()}
    assert "50% of them go round in a circle" in said(slots=slots, settings={"world.intransitive": 0.5})
    assert "circle" not in said(slots=slots)
    assert "circle" not in said(
        settings={"world.intransitive": 0.5}
    )  # its teacher's pairs are nobody's preference
