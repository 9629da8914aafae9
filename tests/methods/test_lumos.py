"""Lumos: what of a dialogue learns, the loss by hand, and a planner that is judged with the grounder before it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import assert_same, learner
from tiny import bare

import panoply as pp
from panoply.experience import Experience
from panoply.methods.agents.lumos import lumos_module
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.run import Run
from panoply.which import take
from panoply.worlds.text.errands import Errands

MODULES = ("planner", "grounder", "integrated", "whole")


def given(module: str, tasks: int = 4) -> tuple[Experience, Errands]:
    world = Errands(module=module, slip=0.0)  # type: ignore[arg-type]
    collect = Collector(world, open_policy("start", world, 0, "cpu"), seed=1001)
    return collect.demonstrations(collect.tasks(tasks)), world


@pytest.mark.parametrize("module", ["planner", "grounder"])
def test_a_module_learns_what_it_says_itself(module: str) -> None:
    """The other's words and what came of actions are prompts: letters of a planner, digits of a grounder."""
    rows, world = given(module)
    said = set(world.text(rows["action"].tolist()))
    assert said <= (set("abcdefgh.") if module == "planner" else set("0123456789"))
    assert len(rows) == len(rows.context["tokens"]), "one decision a turn, of prompts of ten tokens and more"


def test_the_loss_is_the_mean_over_what_is_said() -> None:
    """L = −Σ log π(x_j | x_<j) / Σ 1, against logits of each context by itself; pieces of any size make the same."""
    rows, world = given("integrated", tasks=3)
    policy = open_policy("start", world, 0, "cpu")
    said, contexts = [], [row.tolist() for row in rows.context["tokens"]]
    for number, tokens in enumerate(contexts):
        logp = policy.model(torch.tensor([tokens]))[0].log_softmax(-1)
        said += [logp[at - 1, tokens[at]] for at in rows["position"][rows["context"] == number].tolist()]
    assert 0 < len(said) < sum(map(len, contexts)) / 5, "most of it is prompts"
    learning = dict(policy.named_parameters())
    slopes = torch.autograd.grad(-torch.stack(said).mean(), list(learning.values()))
    for micro in (10**9, 64):
        found = learner(policy, lumos_module(), micro_tokens=micro).gradient(rows)
        assert_same(found, dict(zip(learning, slopes, strict=True)), rel=1e-5)


def test_the_rate_rises_over_three_in_a_hundred_steps() -> None:
    schedule = lumos_module().update.schedule
    found = [schedule(step, 1000) for step in (0, 14, 29, 500)]
    assert found == pytest.approx([1 / 30, 0.5 * (1 - 0.014), 1 - 0.029, 0.5])


def test_the_planner_is_judged_with_the_grounder_before_it(tmp_path: Path) -> None:
    """Two models by two stages, each from the start, and the second one's doors are opened by the first."""
    settings = {"run.held_out": 8, "run.evaluate_every": 0, "ground.run.steps": 1, "act.run.steps": 1}
    bare(tmp_path, "lumos", settings={**settings, "ground.data.batch": 4, "act.data.batch": 4})
    ground, act = (Run.open(tmp_path / name).plan() for name in ("01-ground", "02-act"))
    assert (ground.options.model, act.options.model) == ("start", "start")
    assert (ground.options.seed, ground.world().slip) == (act.options.seed, act.world().slip)
    assert ground.world() == Errands(module="grounder", slip=0.0)
    opened = str(take((tmp_path / "01-ground").resolve(), "last").model.parent)
    assert act.world() == Errands(module="planner", slip=0.0, grounder=opened)


def test_arms_have_the_same_annotations_and_as_many_steps() -> None:
    tasks = [rows.by("episode").first(rows["task"]).tolist() for rows, _ in map(given, MODULES)]
    assert tasks == [tasks[0]] * len(MODULES)
    runs = {name: dict(pp.plan_recipe(name).runs()) for name in ("lumos", "integrated", "direct")}
    assert {plan.options.steps for of in runs.values() for plan in of.values()} == {12}
    assert {name: of["act"].world().module for name, of in runs.items()} == {
        "lumos": "planner", "integrated": "integrated", "direct": "whole"
    }  # fmt: skip
    once = pp.plan_recipe("lumos", settings={"world.form": "onetime"})
    assert {plan.world().form for _, plan in once.runs()} == {"onetime"}, "of both modules"
