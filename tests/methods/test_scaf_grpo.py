"""Scaf-GRPO: one row is replaced, by the weakest hint that works; a group with a success stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hinting import Scripted, given_steps, outcomes
from tiny import bare, metrics
from torch import Tensor

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import Experience
from panoply.methods.reasoning_data.scaf_grpo import levels, scaffolded
from panoply.slots.credit.groups import group
from panoply.worlds.text.chain import Chain

ALL = ("knowledge", "plan", "solution")


class Scores:
    """A policy that finds every token e⁻² likely."""

    def score(self, made: Experience, needs: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        return {"logp": torch.full((len(made),), -2.0), "entropy": torch.zeros(len(made))}


def needs(number: int, steps: int, at: int) -> bool:
    """The first task is solved once without a hint, the second after 3 steps, or after 5, the third never."""
    return at == 1 if number == 0 else steps in (3, 5) if number == 1 else False


def collected(version: int = 100, **settings: Any) -> tuple[Scripted, Experience]:
    collect = Scripted(needs, version)
    collect.policy = Scores()
    chosen = {"tiers": ("solution",), "chunks": 8, "prompts": 3, "group": 4, **settings}
    return collect, scaffolded(**chosen)(collect)


def test_twelve_levels_that_add_up_inside_of_their_tier_and_stop_before_the_answer() -> None:
    """Of `9+2*3+4*5*6*7*8*9=` four quarters of eight steps are 2, 4, 6 and 7: the last one is for the policy."""
    world = Chain(operations=8, levels=(6, 6))
    task = world.task("train", 1)
    found = levels(world, task, ALL, 4)
    assert [tier for tier, _ in found] == ["knowledge"] * 4 + ["plan"] * 4 + ["solution"] * 4
    plan = world.aid(task, "plan")
    for j, (_, helped) in enumerate(found[4:8], 1):
        assert helped.prompt == (*(t for piece in plan[: 2 * j] for t in piece), *task.prompt)
        assert helped.given == ()
    assert [len(helped.given) // 3 for _, helped in found[8:]] == [2, 4, 6, 7]
    assert all(helped.prompt[: len(task.prompt)] == task.prompt for _, helped in found[8:]), (
        "the solution stands alone, without knowledge or plan"
    )
    assert all(helped.id == task.id for _, helped in found)


def test_hints_that_say_no_more_are_left_out() -> None:
    """Three steps in eight chunks, the last one spared: two hints. A problem of sums alone needs no facts."""
    world = Chain(operations=3, levels=(0, 0))
    task = world.task("train", 1)
    assert [len(helped.given) // 3 for _, helped in levels(world, task, ("solution",), 8)] == [1, 2]
    assert levels(world, task, ("knowledge",), 4) == []
    assert levels(Chain(operations=1), Chain(operations=1).task("train", 0), ("solution",), 4) == []


def test_one_failed_row_gives_way_to_the_weakest_hint_that_works() -> None:
    """Not to the first answer that happens to be right: 3 steps and 5 both lead to one, and 3 are fewer."""
    collect, found = collected()
    assert collect.asked[1] == [(number, steps) for number in (1, 2) for steps in range(1, 8)]
    assert outcomes(found) == {0: [0, 1, 0, 0], 1: [0, 0, 0, 1], 2: [0] * 4}
    assert given_steps(found, collect.world) == {0: [0] * 4, 1: [0, 0, 0, 3], 2: [0] * 4}
    first = found.by("episode").keys.tolist()
    assert 4 not in first, "the first failed answer of its group has gone"
    assert {5, 6, 7} <= set(first)
    assert collect.notes == pytest.approx({"failing": 2 / 3, "rescued": 1 / 3, "level": 3, "by_solution": 1})


def test_advantages_of_a_repaired_group_by_hand() -> None:
    """One success in four: mean ¼, deviation ½, so 1.5 for it and −.5 for each failure; 0 where nobody succeeds."""
    _, found = collected()
    found = found.with_columns(reward=found["signal:success"])
    advantage = group(epsilon=0.0)(found)
    episodes = found.by("episode")
    groups = episodes.first(found["group"])
    for key, wanted in ((0, [-0.5, 1.5, -0.5, -0.5]), (1, [-0.5, -0.5, -0.5, 1.5]), (2, [0.0] * 4)):
        rows = episodes.mean(advantage.double())[groups == groups.unique()[key]]
        assert rows.nan_to_num(0.0).tolist() == pytest.approx(wanted)


def test_the_replaced_row_stands_after_its_hint_with_the_logp_it_was_drawn_with() -> None:
    collect, found = collected()
    assert bool((found["logp"] == -1.0).all())
    assert bool((found["position"] >= found.context["shared"][found["context"]]).all()), "no loss on a hint"
    row = found.context["tokens"].tolist()[-1]
    task = collect.numbered([1])[0]
    assert row == [*task.prompt, *collect.world.gold(task)]


@pytest.mark.parametrize("under", ["bare", "both"])
def test_learned_after_the_prompt_without(under: str) -> None:
    """The plan is taken out of the prompt, and the answer scored again; in `both` the same answer stands twice."""
    world = Chain(operations=4)
    collect = Scripted(lambda number, steps, at: len(collect.asked) == 2 and at >= 2, world=world)
    collect.policy = Scores()
    found = scaffolded(
        prompts=1, group=4, tiers=("plan", "solution"), chunks=4, warmup=0, under=under
    )(collect)  # fmt: skip
    task = collect.numbered([0])[0]
    plan = [token for piece in world.aid(task, "plan")[:3] for token in piece]
    answer = world.gold(task)
    last = found.context["tokens"].tolist()[-1]
    last_logp = found["logp"][found["context"] == found["context"].max()]
    if under == "both":
        assert last == [*plan, *task.prompt, *answer]
        assert last_logp.tolist() == [-1.0] * len(answer)
        assert sorted(outcomes(found)[0]) == [0, 0, 1, 1]
    rows = found.context["tokens"].tolist()
    plain = next(at for at, row in enumerate(rows) if row == [*task.prompt, *answer])
    mine = found["context"] == plain
    assert found["logp"][mine].tolist() == [-2.0] * len(answer)
    assert found["action"][mine].tolist() == answer
    assert found["position"][mine].tolist() == list(range(len(task.prompt), len(task.prompt) + len(answer)))
    assert len(found.by("episode")) == 4
    assert collect.notes["level"] == 3


def test_steps_of_the_solution_stay_in_a_bare_prompt() -> None:
    """The answer goes on from them: without them it would be another one, and wrong."""
    collect, found = collected(under="bare")
    assert given_steps(found, collect.world)[1] == [0, 0, 0, 3]
    assert found["logp"][-1] == -2.0


def test_nothing_is_asked_again_in_the_warm_up_or_where_nobody_fails() -> None:
    assert len(collected(49, warmup=50)[0].asked) == 1
    assert len(collected(50, warmup=50)[0].asked) == 2
    collect = Scripted(lambda number, steps, at: True)
    scaffolded(prompts=2, group=2, tiers=("solution",), warmup=0)(collect)
    assert len(collect.asked) == 1
    assert collect.notes["failing"] == 0


def test_a_run(tmp_path: Path) -> None:
    """With all tiers and both prompts, from a model that fails: sampler and scorer agree on every row."""
    settings = {
        "run.device": "cpu",
        "world.operations": 3,
        "world.slip": 1.0,
        "world.levels": (2, 3),
        "run.held_out": 4,
        "sample.prompts": 3,
        "sample.group": 4,
        "sample.tiers": ALL,
        "sample.chunks": 2,
        "sample.warmup": 0,
        "sample.under": "both",
        "sample.name": "ended",
        "reward.name": "ended",
    }
    made = bare(tmp_path / "run", "scaf-grpo", model="fresh", steps=2, settings=settings)
    logged = metrics(made.run)
    assert any(row["rescued"] > 0 for row in logged)
    assert all(row["step0_gap"] < 1e-4 for row in logged if "step0_gap" in row)
    assert all(row["entropy"] == row["entropy"] for row in logged)


@pytest.mark.parametrize(
    ("world", "settings", "said"),
    [
        ("manyanswers", {}, "'hint'"),
        ("add", {"sample.tiers": ALL}, "'knowledge'"),
        ("chain", {"sample.tiers": ("solution", "plan")}, "in that order"),
        ("chain", {"sample.tiers": ()}, "some of knowledge, plan, solution"),
        ("chain", {"sample.tiers": ("luck",)}, "some of knowledge, plan, solution"),
        ("chain", {"sample.chunks": 0}, "at least 1"),
        ("chain", {"sample.group": 2, "sample.under": "both"}, "at least 3"),
        ("chain", {"sample.group": 1}, "at least 2"),
        ("chain", {"sample.under": "bare"}, "sample.under has no effect"),
    ],
)
def test_refusals(world: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(PanoplyError, match=said):
        pp.plan("scaf-grpo", world, settings=settings)
