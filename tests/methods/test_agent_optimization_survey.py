"""The survey of agents: its questions as tags, and the loops it names, which keep, pair and cut episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import panoply as pp
from panoply import data_folder, registry
from panoply.data_folder import Row
from panoply.evidence.arms import Arm, Budget
from panoply.methods.agents import agent_optimization_survey as survey
from panoply.policies.decoder import DecoderConfig
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.slots.make.answers import first_difference, kept_by
from panoply.tags import AGENTS, AXES
from panoply.worlds.text.keydoor import Keydoor

WORLD = Keydoor()


def tags_of(name: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for work in registry.works():
        for tag in work.tags if work.name == name else ():
            key, _, answer = tag.partition("=")
            found.setdefault(key, set()).add(answer)
    return found


@pytest.mark.parametrize(
    ("name", "source", "granularity", "stage", "failures"),
    [
        ("sft", "expert", "token", "sft", "alike"),
        ("bc", "expert", "turn", "sft", "alike"),
        ("dpo", "given", "trajectory", "preference", "contrast"),
        ("online-dpo", "self", "trajectory", "preference", "contrast"),
        ("grpo", "self", "trajectory", "rl", "contrast"),
        ("ppo", "self", "token", "rl", "contrast"),
        ("reinforce++", "self", "token", "rl", "contrast"),
        ("trpo", "self", "turn", "rl", "contrast"),
        ("sac", "self", "turn", "rl", "contrast"),
        ("gigpo", "self", "turn", "rl", "contrast"),
        ("b-coder", "expert", "token", "rl", "contrast"),
        ("reward-model", "given", "trajectory", "judge", "contrast"),
        ("sapo-swarm", "agents", "trajectory", "rl", "contrast"),
        ("relift", "self expert", "token trajectory", "sft rl hybrid", "alike contrast"),
        ("opa-dpo", "self expert", "token trajectory", "sft preference hybrid", "alike contrast correct"),
        ("filtered-bc", "self", "token", "sft", "discard"),
        ("trajectory-dpo", "self", "trajectory", "preference", "contrast"),
        ("step-dpo", "self", "turn", "preference", "contrast"),
        ("sft-then-grpo", "self expert", "token trajectory", "sft rl hybrid", "alike contrast"),
    ],
)
def test_what_follows(name: str, source: str, granularity: str, stage: str, failures: str) -> None:
    found = tags_of(name)
    said = {"source": source, "granularity": granularity, "stage": stage, "failures": failures}
    assert {key: found[key] for key in said} == {key: set(words.split()) for key, words in said.items()}
    assert found["param_free"] == {"no"}


def test_every_work_is_on_every_axis_and_branches_overlap() -> None:
    order = survey.agent_optimization_survey()
    works = {w.name for w in registry.works() if w.kind in ("method", "recipe")}
    for axis in AXES:
        if axis.survey == AGENTS:
            named = [names for heading, names in order.items() if heading.startswith(f"{axis.key}=")]
            assert set().union(*named) == works
    assert all(order[branch] for branch in survey.BRANCHES)
    hybrid, shown = (order[b] for b in survey.BRANCHES if b.startswith(("hybrid", "fine-tuning on what")))
    assert "rlhf" in hybrid
    assert "rlhf" in shown


# ------------------------------------------------------------------ loops


def task_rows(*answers: list[int], **numbers: list[float]) -> list[Row]:
    task = WORLD.task("train", 0)
    return [
        {
            "task": 0,
            "id": task.id,
            "prompt": "",
            "answer": a,
            "numbers": {k: v[i] for k, v in numbers.items()},
        }
        for i, a in enumerate(answers)
    ]


def test_episodes_that_earn_enough_are_kept_as_often_as_they_came() -> None:
    class Said:
        def answered(self, *asked: Any) -> list[list[Row]]:
            assert asked == ("there", 2, 4, 0.5)
            rows = task_rows([1], [1], [2], [3], success=[1.0, 1.0, 0.0, 0.0], progress=[1.0, 1.0, 0.5, 0.25])
            return [rows, rows[2:]]

    asked: dict[str, Any] = {"policy": "there", "prompts": 2, "answers": 4, "temperature": 0.5}
    assert [row["answer"] for row in kept_by(**asked)(Said())] == [[1], [1]]
    some = kept_by(**asked, name="progress", least=0.5)(Said())
    assert [row["answer"] for row in some] == [[1], [1], [2], [2]]


@pytest.mark.parametrize("words", [False, True])
def test_pairs_are_cut_after_the_first_turn_that_differs(tmp_path: Path, words: bool) -> None:
    """What comes before is the same prompt by prompt, so that in DPO's margin the last turn alone is left."""
    world = Keydoor(words=words)
    task = world.task("train", 0)

    def said(actions: str) -> list[int]:
        return [token for action in actions for token in world.tokens(world.word(action))]

    def row(good: str, bad: str) -> Row:
        return {"task": 0, "id": task.id, "prompt": "", "chosen": said(good), "rejected": said(bad)}

    config = DecoderConfig(**{**world.default_model(), "width": 16, "layers": 1, "heads": 2, "inner": 16})
    policy = TextPolicy.fresh(config, world.tokenizer, seed=1)
    collect = Collector(world, policy, 0)

    class Maker:
        def __init__(self) -> None:
            self.world = world

        def collect(self, policy: str) -> Collector:
            return collect

    data_folder.write(tmp_path, [row("NSNSPP", "NSWP"), row("NS", "NSE"), row("N", "S")])
    found = list(first_difference(data=str(tmp_path))(Maker()))
    assert [(r["chosen"], r["rejected"]) for r in found] == [
        (said("NSN"), said("NSW")),
        (said("N"), said("S")),
    ]

    pairs = collect.preferred([task], [found[0]["chosen"]], [found[0]["rejected"]])
    assert pairs.pairs is not None
    good, bad = (pairs.take(pairs["episode"] == pairs.pairs[side][0]) for side in ("chosen", "rejected"))
    before = [e["turn"] < 2 for e in (good, bad)]
    assert torch.equal(good["action"][before[0]], bad["action"][before[1]])
    assert good["turn"].max() == bad["turn"].max() == 2


SMALL = {
    "run.held_out": 2,
    "explore.prompts": 2,
    "explore.answers": 2,
    "learn.data.batch": 2,
}


def test_rounds_explore_other_tasks_with_the_policy_that_has_learned() -> None:
    (arm,) = Arm.of("iterated-filtered-bc")
    made: Any = arm.plan("keydoor:aliased", 1, None)
    assert made.first["explore"].options.seed != made.later["explore"].options.seed
    explore, learn = [turn.stage for turn in made.recipe.turns()][2:4]
    assert explore.make is not None
    assert explore.make.settings()["policy"] == learn.options["model"] == "@last"


def test_nothing_that_is_good_enough_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(pp.PanoplyError, match="No row of data came out of it"):
        tiny.bare(
            tmp_path / "run", "filtered-bc", world="keydoor", model="fresh",
            settings={**SMALL, "explore.least": 2.0},
        )  # fmt: skip


def test_all_sides_of_the_claim_have_as_many_episodes_and_steps() -> None:
    budget, episodes = Budget.parse(survey.CLAIM.budget), {}
    for word in survey.CLAIM.order:
        (arm,) = Arm.of(word)
        made: Any = arm.plan(survey.CLAIM.world, 1, budget, settings=survey.CLAIM.settings)
        if arm.is_recipe:
            assert made.steps == survey.STEPS
            make = made.recipe.stages[0].make.settings()
            episodes[arm.label] = made.recipe.rounds * make["prompts"] * make["answers"]
        else:
            assert made.options.steps == survey.STEPS
            held = made.method.settings()
            a_step = (
                held["data.batch"] if arm.label == "bc" else held["sample.prompts"] * held["sample.group"]
            )
            episodes[arm.label] = a_step * survey.STEPS
    assert set(episodes.values()) == {survey.PROMPTS * survey.ANSWERS}
