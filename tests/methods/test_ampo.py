"""AMPO: teachers only where all fail, the best understood first, and a gradient for what is unlikely."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kit import Slow, assert_same, batch, gradient, hand, ragged, rows_of, shuffled, slopes
from papers import groups_of
from tiny import bare, metrics
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import OWN, TEACHER, Experience
from panoply.methods.reasoning_data.ampo import ampo
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.slots.sample.taught import taught, understood, verified
from panoply.slots.update.optimisers import sgd
from panoply.worlds.text.styles import Styles

WORLD = Styles()


@pytest.fixture
def collector() -> Collector:
    return Collector(WORLD, open_policy("start", WORLD, 0, "cpu"), seed=1)


def said(found: Experience, episode: int) -> str:
    row = int(found["context"][found["episode"] == episode][0])
    return WORLD.text(found.context.ragged("tokens")[row].tolist())


@pytest.mark.parametrize(("p", "slope"), [(0.1, 0.25), (0.9, 0.09), (0.001, 0.0001 / 0.101**2)])
def test_the_gradient_of_a_teacher_s_token(p: float, slope: float) -> None:
    """γp/(p + γ)², largest at p = γ, times its advantage; with A = 2, and whatever a clip would say."""
    made = hand(source=[TEACHER], advantage=[2.0], logp=[math.nan])
    seen = batch(made, logp=[math.log(p)])
    value, _ = ampo().surrogate(seen)
    assert value.tolist() == pytest.approx([2 * p / (p + 0.1)])
    assert slopes(value, seen.now["logp"]) == pytest.approx([2 * slope])


def test_own_rows_are_clipped_twice() -> None:
    """Ratios 1.5 with A = 1, and 20 with A = −1: bounded by 1.2 and by ten times A."""
    made = hand(source=[OWN] * 2, advantage=[1.0, -1.0], logp=[math.log(0.4), math.log(0.04)])
    value, _ = ampo().surrogate(batch(made, logp=[math.log(0.6), math.log(0.8)]))
    assert value.tolist() == pytest.approx([1.2, -10.0])


def slow(made: Experience) -> Tensor:
    """−1/(E·L)·[Σ own min(ρA, clip(ρ)A) + Σ teacher p/(p + .1)·A], A = R − mean of the mixed group."""
    table, groups = Slow(), groups_of(made)
    returns = {e: sum(r["reward"] for r in rows_of(made, episode=e)) for g in groups for e in g}
    worth = {e: returns[e] - sum(returns[m] for m in g) / len(g) for g in groups for e in g}
    loss = torch.zeros((), dtype=torch.float64)
    for row in rows_of(made):
        logp, a = table.logp(row["state"], row["action"]), worth[row["episode"]]
        if row["source"] == TEACHER:
            value = logp.exp() / (logp.exp() + 0.1) * a
        else:
            rho = (logp - row["logp"]).exp()
            value = torch.minimum(rho * a, rho.clamp(0.8, 1.2) * a)
        loss = loss - value / (len(returns) * 16)
    return table.gradient(loss)


@pytest.mark.parametrize("micro", [1, 10**9])
def test_the_gradient_is_the_equation_s(micro: int) -> None:
    made = ragged(drift=0.3)
    theirs = made["episode"] % 3 == 0
    made = made.with_columns(
        source=torch.where(theirs, TEACHER, OWN),
        logp=made["logp"].masked_fill(theirs, math.nan),
        reward=theirs.double() * made.by("episode").is_last(),
    )
    method = ampo().but(regularise=(), reduce=ampo().reduce.but(length=16), update=sgd(lr=1.0, clip=0.0))
    made = made.with_columns(advantage=method.credit(made))
    for rows in (made, shuffled(made)):
        assert_same(gradient(method, rows, micro_tokens=micro), slow(made))


def test_only_groups_that_fail_have_teachers(collector: Collector) -> None:
    """As large as before, two of four replaced, right answers in two styles; the others are as they were sampled."""
    part = taught(prompts=12, group=4, answers=2, when="failed", choose="understood")
    found = part(collector)
    plain = Collector(WORLD, collector.policy, seed=1)
    before = plain.episodes(plain.tasks(12), 4)
    episodes, old = found.by("episode"), before.by("episode")
    won = before.by("group").max(old.rows(old.sum(before["signal:success"])))
    assert 0 < int((won > 0).sum()) < 12, "some groups fail and some do not"
    theirs = episodes.first(found["source"]) == TEACHER
    keys = episodes.first(found["group"])
    for group, right in zip(before.by("group").keys.tolist(), won.tolist(), strict=True):
        members = episodes.keys[keys == group].tolist()
        assert len(members) == 4
        given = episodes.keys[(keys == group) & theirs].tolist()
        assert len(given) == (0 if right else 2)
        styles = {said(found, e).split("=")[1][0] for e in given}
        assert len(styles) == len(given), "of different teachers"
        assert "D" not in styles, "the one who is not understood is not heard"
        own = [e for e in members if e not in given]
        assert [said(found, e) for e in own] == [said(before, e) for e in own]
    assert bool((episodes.sum(found["signal:success"])[theirs] == 1).all())
    assert collector.notes["taught"] == int((won == 0).sum()) / 12
    again = Collector(WORLD, collector.policy, seed=1)
    assert torch.equal(part(again)["action"], found["action"]), "chance depends on names alone"


def test_understanding_is_of_the_final_answer_alone(collector: Collector) -> None:
    """Against every token's probability, one by one; and not of the style's letter, nor of the steps."""
    tasks = collector.tasks(3)
    asked = [(task, verified(WORLD, task)) for task in tasks]
    for (task, answers), scores in zip(asked, understood(collector, asked), strict=True):
        for answer, score in zip(answers, scores.tolist(), strict=True):
            whole = torch.tensor([[*task.prompt, *answer]])
            with torch.no_grad():
                p = collector.policy.model(whole).softmax(-1)[0]
            last = [float(p[-3, whole[0, -2]]), float(p[-2, whole[0, -1]])]
            assert score == pytest.approx(sum(last) / 2, rel=1e-4)


def test_the_best_understood_come_first_and_the_foreign_one_last(collector: Collector) -> None:
    task = next(t for t in collector.tasks(20) if WORLD.part_of(t) == "plain")
    every = verified(WORLD, task)
    score = understood(collector, [(task, every)])[0]
    assert int(score.argmin()) == 3, "letters say little to who has never read them"
    assert float(score[:3].min()) > 0.9


def test_wrong_teachers_are_left_out_and_one_teacher_needs_no_ranking(collector: Collector) -> None:
    task = next(t for t in collector.tasks(20) if WORLD.part_of(t) == "trapped")
    lax = SimpleNamespace(
        solutions=lambda task: [WORLD.gold(task, "A"), WORLD.gold(task, "C")], grade_all=WORLD.grade_all
    )
    assert verified(lax, task) == [WORLD.gold(task, "C")]


def test_it_trains_and_counts(tmp_path: Path) -> None:
    settings = {"sample.prompts": 4, "sample.group": 3, "run.held_out": 4}
    bare(tmp_path, "ampo", world="styles:wall", model="start", steps=2, settings=settings)
    rows = metrics(tmp_path)
    assert [row["taught"] for row in rows] == [1.0, 1.0]
    assert all(math.isfinite(row["loss"]) and row["gradient_norm"] > 0 for row in rows)
    assert 0 < rows[0]["understood"] < 1


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PanoplyError, match="needs a world with 'reference'"):
        pp.plan("ampo", "cartpole")
    with pytest.raises(PanoplyError, match="sample.choose has no effect: chain has one teacher"):
        pp.plan("ampo", "chain:wall", settings={"sample.choose": "random"})
    with pytest.raises(PanoplyError, match="sample.answers has no effect: chain has one teacher"):
        pp.plan("ampo", "chain:wall", settings={"sample.answers": 3})
    with pytest.raises(PanoplyError, match="has to keep an episode"):
        pp.plan("ampo", "styles", settings={"sample.answers": 8})
