"""Recipes that go on: rounds that start from one another, what changes from the second on, and when they end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny

import panoply as pp
from panoply import registry
from panoply.errors import PanoplyError
from panoply.progress import Progress
from panoply.recipes import Recipe, Stage
from panoply.run import Run
from panoply.until import Until
from panoply.which import take

SETTINGS: dict[str, Any] = {
    "world.operations": 2,
    "run.held_out": 4,
    "run.steps": 2,
    "run.evaluate_every": 0,
    "imitate.data.batch": 4,
    "optimise.sample.prompts": 4,
    "optimise.sample.group": 8,
    "optimise.reward.name": "ended",
}


def stages(**again: Any) -> tuple[Stage, ...]:
    return (
        Stage("imitate", "sft", options={"model": "@last"}, again=again),
        Stage("optimise", "grpo", options={"model": "@imitate"}),
    )


def carry_out(folder: Path, recipe: Recipe, **choices: Any) -> pp.Trained:
    registry.recipe("toy-rounds@1")(lambda: recipe)
    settings = {**SETTINGS, **choices.pop("settings", {})}
    common: dict[str, Any] = {"world": "chain", "threads": 1, "progress": Progress(), "settings": settings}
    return pp.train("toy-rounds", run=folder, **{**common, "model": "fresh", **choices})


def begun(folder: Path) -> bytes:
    return tiny.model_bytes(folder, 0)


def test_a_second_round_trains_on_and_a_killed_one_resumes(tmp_path: Path, registries: None) -> None:
    whole = tmp_path / "whole"
    done = carry_out(whole, Recipe(stages(), rounds=2))
    names = ["01-imitate", "02-optimise", "03-imitate", "04-optimise"]
    assert sorted(p.name for p in whole.glob("0*")) == names
    prints = [tiny.result(whole / name)["fingerprint"] for name in names]
    assert len(set(prints)) == 4
    assert done.fingerprint == prints[-1]
    assert (
        begun(whole / "03-imitate") == (take(whole / "02-optimise").model / "model.safetensors").read_bytes()
    )
    seeds = [Run.open(whole / name).plan().options.seed for name in names]
    assert seeds[0] == seeds[1] == 0
    assert seeds[2] == seeds[3] != 0

    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "04-optimise")
    (cut / "03-imitate/result.json").unlink()
    shutil.rmtree(cut / "03-imitate/checkpoints/step-0000002")
    tiny.resume(cut)
    assert [tiny.result(cut / name)["fingerprint"] for name in names] == prints


def test_again_replaces_options_and_settings_from_the_second_round_on(
    tmp_path: Path, registries: None
) -> None:
    again = {"model": "@optimise", "steps": 1, "data.batch": 2}
    carry_out(
        tmp_path / "a",
        Recipe(stages(**again), rounds=2),
        settings={"run.steps": 2, "imitate.data.batch": 4},
    )
    first, second = (Run.open(tmp_path / "a" / name).plan() for name in ("01-imitate", "03-imitate"))
    assert first.options.model == "fresh"
    assert "02-optimise" in second.options.model


def test_rounds_end_when_their_rule_is_met(tmp_path: Path, registries: None) -> None:
    recipe = Recipe(stages(), rounds=3, until="success>=0")
    carry_out(tmp_path / "a", recipe)
    assert sorted(p.name for p in (tmp_path / "a").glob("0*")) == ["01-imitate", "02-optimise"]
    carry_out(tmp_path / "b", recipe, settings={"recipe.rounds": "2", "recipe.until": "success>1"})
    assert len(list((tmp_path / "b").glob("0*"))) == 4


def test_a_run_ends_when_its_rule_is_met(tmp_path: Path) -> None:
    rules = {"total_episodes>=16": 2, "success>=0": 0, "success>1": 4, "held_out_sampled > 2": 4}
    for number, (rule, steps) in enumerate(rules.items()):
        tiny.train(tmp_path / str(number), until=rule)
        assert tiny.result(tmp_path / str(number))["steps"] == steps, rule
    with pytest.raises(
        PanoplyError, match="Unknown metric of the rule until 'sucess'. Did you mean 'success'?"
    ):
        tiny.train(tmp_path / "x", until="sucess>0.5")
    with pytest.raises(PanoplyError, match="until is a rule such as success>0.9"):
        tiny.train(tmp_path / "y", until="success=1")


def test_a_run_that_was_killed_after_its_rule_was_met_ends_there(tmp_path: Path) -> None:
    done = tiny.train(tmp_path / "a", until="total_episodes>=16", checkpoint_every=1)
    (tmp_path / "a/result.json").unlink()
    assert tiny.resume(tmp_path / "a").fingerprint == done.fingerprint
    assert tiny.result(tmp_path / "a")["steps"] == 2


@pytest.mark.parametrize(
    ("rule", "measured", "met"),
    [
        ("success>0.5", {"of": "success", "greedy": 0.1, "sampled": 0.6, "sampled_interval": []}, True),
        ("success>0.5", {"of": "success", "greedy": 0.9, "sampled": 0.5, "sampled_interval": []}, False),
        ("success>=.5", {"of": "success", "sampled": 0.5, "sampled_interval": []}, True),
        ("return<-1e2", {"of": "return", "stochastic": -101, "stochastic_interval": []}, True),
        ("greedy<=0", {"of": "success", "greedy": 0.0}, True),
    ],
)
def test_rules(rule: str, measured: dict[str, Any], met: bool) -> None:
    assert Until.parse(rule).met(measured, {"step": 1}) is met


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Recipe(()), "needs a stage that trains"),
        (lambda: Recipe(stages(), rounds=0), "from 1 to 1000 rounds, not 0"),
        (lambda: Recipe(stages(), rounds=1001), "from 1 to 1000 rounds, not 1001"),
        (lambda: Recipe(stages(), rounds=True), "from 1 to 1000 rounds, not True"),
        (lambda: Recipe(stages(model="@imitate")), "again has no effect in a recipe of one round"),
        (lambda: Recipe(stages(model="@judge"), 2), "Unknown stage 'judge'"),
        (lambda: Recipe(stages(), until="success>1"), "of one round cannot end early"),
        (lambda: Recipe(stages(), 2, until="soon"), "until is a rule such as"),
        (lambda: Recipe((Stage("a", "sft"), Stage("a", "sft"))), "needs a name of its own"),
        (lambda: Recipe((Stage("last", "sft"),)), "needs a name of its own"),
        (lambda: Recipe((Stage("a"),)), "needs a stage that trains"),
        (
            lambda: Recipe((Stage("a", "sft", options={"model": "@b"}), Stage("b", "sft")), 2),
            "not an earlier stage: change their order, or name it under again, for the rounds after the first",
        ),
    ],
)
def test_what_is_no_recipe(make: Any, sentence: str) -> None:
    with pytest.raises(PanoplyError) as refused:
        make()
    assert sentence in str(refused.value)


def test_what_a_later_round_changes_is_checked_before_any_compute(tmp_path: Path, registries: None) -> None:
    recipe = Recipe(stages(**{"data.batsch": 3}), rounds=2)
    with pytest.raises(PanoplyError, match=r"Stage imitate \(sft, from the second round on\): .*'batch'"):
        carry_out(tmp_path / "a", recipe)
    with pytest.raises(PanoplyError, match="Unknown setting of a recipe 'round'"):
        carry_out(tmp_path / "a", Recipe(stages(), rounds=2), settings={"recipe.round": 3})
    assert not any(tmp_path.iterdir())
    one = Recipe(stages(steps=3), rounds=2, until="success>1").but(rounds=1)
    assert (one.rounds, one.until, one.stages[0].again) == (1, None, {})


def test_the_record_of_a_recipe_holds_the_choices(tmp_path: Path, registries: None) -> None:
    carry_out(tmp_path / "a", Recipe(stages()))
    stored = json.loads((tmp_path / "a/recipe.json").read_text())
    assert stored["recipe"] == "toy-rounds@1"
    assert stored["choices"]["model"] == "fresh"
