"""Recipes as arms: what they may spend, stages that arms share, and the curve over all stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import panoply as pp
from panoply import extensions
from panoply.errors import PanoplyError
from panoply.evidence import cache, pool, scores
from panoply.evidence.arms import Arm, Budget, default_budget
from panoply.evidence.claims import Learns
from panoply.evidence.compare import Comparison, compare
from panoply.evidence.contest import Contest, Desk
from panoply.recipe_plans import RecipePlan
from panoply.recipes import Recipe, Stage
from panoply.run import Run
from panoply.slots.make.answers import answered_by
from panoply.values import part_from_json

TWO = """
from panoply.recipes import Recipe, Stage
from panoply.registry import recipe
from panoply.slots.make.answers import answered_by

@recipe("toy-two@1", world="chain")
def two() -> Recipe:
    '''Imitate, then learn from what is right.'''
    return Recipe((
        Stage("imitate", "sft", {"data.batch": 4}, {"steps": 2}),
        Stage("told", make=answered_by(policy="@imitate", prompts=2, answers=2)),
        Stage("learn", "grpo", {"reward.name": "ended"}, {"model": "@imitate", "steps": 2}),
    ))
"""
SETTINGS = {"world.operations": 2, "run.held_out": 8, "learn.sample.prompts": 2, "learn.sample.group": 4}
SMALL: dict[str, Any] = {"world": "chain", "model": "fresh", "settings": SETTINGS}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, Path]:
    """Two recipes that differ in their last stage, at the same time."""
    place = tmp_path_factory.mktemp("arms")
    (place / "two.py").write_text(TWO)
    found = compare(
        "toy-two", "fast=toy-two:learn.update.lr=1e-2", seeds=1, budget="steps=5", workers=2, cache=place / ".cache",
        folder=place / "out", watch=pool.Watch(), plugins=[str(place / "two.py")], **SMALL,
    )  # fmt: skip
    return found, place


def test_arms_share_the_stages_that_are_the_same(compared: tuple[Comparison, Path]) -> None:
    found, place = compared
    assert not found.failed
    one, other = (cache.stages(Path(result.folders[0])) for result in found.results)
    assert list(one) == list(other) == ["01-imitate", "02-told", "03-learn"]
    assert one["01-imitate"] == other["01-imitate"]
    assert one["02-told"] == other["02-told"]
    assert one["03-learn"] != other["03-learn"]
    assert len(list((place / ".cache").glob("sft-*"))) == 1
    assert str(one["01-imitate"].resolve()) in Run.open(one["03-learn"]).plan().options.model


def test_the_last_stage_takes_what_the_others_leave_and_the_curve_is_over_all(
    compared: tuple[Comparison, Path],
) -> None:
    found, _ = compared
    stages = cache.stages(Path(found.results[0].folders[0]))
    steps = [Run.open(stages[name]).plan().options.steps for name in ("01-imitate", "03-learn")]
    assert steps == [2, 3]
    curve = found.results[0].curves["chain"][0]
    assert [x for x, _ in curve] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    last = scores.read(stages["03-learn"], "success", "steps", 3)
    assert [y for _, y in curve[3:]] == [y for _, y in last.curve[1:]]
    assert found.results[0].scores["chain"][0] == last.value


def test_a_second_comparison_finds_everything(compared: tuple[Comparison, Path]) -> None:
    found, place = compared
    order = pool.Order("again", plan(place, Budget.parse("steps=5")))
    pool.run_all([order], place / ".cache", 1, pool.Watch())
    assert order.cached
    assert str(order.folder) == found.results[0].folders[0]


def plan(place: Path, budget: Budget | None, word: str = "toy-two", **more: Any) -> RecipePlan:
    extensions.load_plugin(str(place / "two.py"))
    asked = {"plugins": [str(place / "two.py")], "greedy": False, **SMALL, **more}
    made = Arm.parse(word).plan(asked.pop("world"), 0, budget, **asked)
    assert isinstance(made, RecipePlan)
    return made


def test_a_budget_for_one_stage(compared: tuple[Comparison, Path]) -> None:
    _, place = compared
    made = plan(place, Budget.parse("learn.episodes=32"))
    assert (made["learn"].options.episodes, made["learn"].options.steps, made.counted) == (32, 4, "learn")
    assert made["imitate"].options.steps == 2
    assert Budget.parse("learn.run.steps=7") == Budget("steps", 7.0, "learn")
    order = pool.Order("one", made)
    pool.run_all([order], place / ".cache", 1, pool.Watch())
    assert order.problem is None
    assert [x for x, _ in scores.read(order.folder, "success", "episodes", 32).curve] == [0, 8, 16, 24, 32]


def test_everything_determines_the_hash(compared: tuple[Comparison, Path]) -> None:
    _, place = compared
    words = ("toy-two", "toy-two:imitate.data.batch=3", "toy-two:told.answers=3", "toy-two:update.lr=1e-2")
    made = [plan(place, Budget.parse("steps=5"), word) for word in words]
    assert len({m.hash() for m in made}) == len({cache.identity(m) for m in made}) == len(words)
    assert made[3]["learn"].method.settings()["update.lr"] == 1e-2  # of the stage it ends with
    assert made[0].hash() == plan(place, Budget.parse("steps=5")).hash()


def test_a_claim_about_a_recipe(compared: tuple[Comparison, Path], registries: None) -> None:
    _, place = compared
    extensions.load_plugin(str(place / "two.py"))
    slow = {**SETTINGS, "run.model": "fresh", "imitate.run.steps": 2}
    claim = Learns(
        "…",
        over="toy-two:told.answers=3",
        world="chain",
        budget="steps=5",
        settings=slow,
        tune={},
        fixed="a test",
    )
    contest = Contest(
        claim, ("toy-two", "toy-two:told.answers=3"), Desk(place / ".cache", 1, watch=pool.Watch(), most=1)
    )
    heats = contest.heats(contest.arms, [0])
    areas = contest.values(heats, "area", contest.labels)
    assert areas["toy-two"] == areas["toy-two:told.answers=3"]


def test_the_default_budget_of_a_recipe_is_all_its_steps() -> None:
    made = pp.plan_recipe("rlhf", "strings")
    assert default_budget(Arm.parse("rlhf"), "strings") == Budget("steps", made.steps)
    assert made.steps == sum(stage.options.steps for stage in made.values())


def test_rounds_are_measured_ten_times_in_all() -> None:
    """Four rounds of eight steps are thirty-two: after every fourth of them, and not after each."""
    plan = Arm.parse("agent-rlvr").plan("keydoor:guided", 0, Budget("steps", 32))
    assert isinstance(plan, RecipePlan)
    learn = plan["learn"].options
    assert (learn.steps, learn.evaluate_every) == (8, 4)


def test_a_recipe_round_trips_through_json() -> None:
    recipe = Recipe(
        (
            Stage("told", make=answered_by(prompts=3)),
            Stage("a", "sft", {"x.y": 1}, {"steps": 2}, again={"steps": 3}),
        ),
        rounds=3,
        until="success>0.5",
    )
    text = json.dumps(recipe.to_json())
    assert Recipe.from_json(json.loads(text), part_from_json) == recipe


def test_a_diverged_stage_ends_the_recipe(compared: tuple[Comparison, Path]) -> None:
    _, place = compared
    order = pool.Order("lost", plan(place, Budget.parse("steps=5"), "toy-two:imitate.update.lr=1e12"))
    pool.run_all([order], place / ".cache", 1, pool.Watch())
    assert order.problem is None
    assert list(cache.stages(order.folder)) == ["01-imitate"]
    assert scores.read(order.folder, "success", "steps", 5).diverged
    with pytest.raises(PanoplyError, match="Unknown stage of toy-two@1 that trains 'told'"):
        plan(place, Budget.parse("told.steps=5"))
