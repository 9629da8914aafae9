"""The technical survey: three axes that cross, a recipe that differs by its reward alone, a claim that can be run."""

from __future__ import annotations

from panoply import registry
from panoply.evidence.arms import Arm, Budget
from panoply.methods.preferences.rl4llm_survey import CLAIM, grpo_from_preferences, rl4llm_survey
from panoply.recipe_plans import RecipePlan


def test_every_method_and_recipe_stands_on_each_of_the_three_axes() -> None:
    order = rl4llm_survey()
    keys = [heading.split("=")[0] for heading in order]
    assert list(dict.fromkeys(keys)) == ["reward", "feedback", "optimisation"]
    works = {w.name for w in registry.works() if w.kind in ("method", "recipe")}
    for key in dict.fromkeys(keys):
        named = [set(names) for heading, names in order.items() if heading.startswith(f"{key}=")]
        assert set().union(*named) == works
    below = {heading.split(":")[0]: set(names) for heading, names in order.items()}
    assert {"ppo", "grpo"} <= below["reward=rule"]
    assert "ppo" in below["optimisation=critic"]
    assert "ppo" not in below["optimisation=critic-free"]
    assert "rlhf" in below["reward=learned"]
    assert not any(heading.startswith(("feedback=online", "feedback=offline")) for heading in order)


def test_the_arms_of_the_claim_differ_in_what_they_learn_from_alone() -> None:
    """Both GRPO runs have the same settings but the reward; the reward model and DPO have the same pairs."""
    budget = Budget.parse(CLAIM.budget)
    verifier, judged, direct = (
        arm.plan(CLAIM.world, 1, budget, settings=CLAIM.settings)
        for word in CLAIM.order
        for arm in Arm.of(word)
    )
    assert isinstance(judged, RecipePlan)
    optimise, judge = judged["optimise"], judged["judge"]
    differ = {path for path, *_ in optimise.method.diff(verifier.method)}  # type: ignore[union-attr]
    assert {path.split(".")[0] for path in differ} == {"reward", "models"}
    assert optimise.options.steps == verifier.options.steps == direct.options.steps == 40
    pairs = [made.method.settings() for made in (judge, direct)]  # type: ignore[union-attr]
    for name in ("data", "data.pairs", "data.answers", "data.batch"):
        assert pairs[0][name] == pairs[1][name]
    assert pairs[0]["data.pairs"] == 500
    assert all(made.world().noise == 0.2 for made in (verifier, judge, direct))


def test_the_recipe_optimises_what_its_judge_says() -> None:
    stages = {stage.name: stage for stage in grpo_from_preferences().stages}
    assert stages["optimise"].settings["reward.name"] == "model"
    assert stages["optimise"].settings["models.reward_model.folder"] == "@judge"
    line = next(w for w in registry.works() if w.name == "grpo-from-preferences")
    assert {"data=prefs", "reward=learned", "feedback=online", "feedback=offline"} <= set(line.tags)
