"""Recipes: stages that start from others, folders that resume, and choices for one stage or all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import panoply as pp
from panoply.api import last_model
from panoply.errors import PanoplyError
from panoply.loops.job import Job
from panoply.policies.value import ValueModel
from panoply.progress import Progress
from panoply.recipe_plans import plan_stages
from panoply.recipes import Recipe, Stage
from panoply.report.run_index import RunIndex
from panoply.run import Run
from panoply.which import take

SMALL: dict[str, Any] = {
    "run.held_out": 8,
    "imitate.run.steps": 1,
    "judge.run.steps": 2,
    "judge.data.batch": 4,
    "imitate.data.batch": 4,
    "optimise.run.steps": 2,
    "optimise.sample.prompts": 8,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe") / "rlhf"
    pp.train("rlhf", run=folder, settings=SMALL, threads=1, progress=Progress())
    return folder


def test_rlhf_runs_its_stages_from_one_another(finished: Path) -> None:
    imitate, judge, optimise = (Run.open(finished / n) for n in ("01-imitate", "02-judge", "03-optimise"))
    assert [r.status() for r in (imitate, judge, optimise)] == ["finished"] * 3
    begun, judged = (str(take(r.folder.resolve(), "last").model.parent) for r in (imitate, judge))
    assert judge.plan().options.model == begun
    plan = optimise.plan()
    assert plan.options.reference == begun
    assert plan.method.settings()["models.reward_model.folder"] == judged
    assert plan.method.settings()["reward.reward.name"] == "model"
    assert "accuracy" in (judge.result() or {})["after"]
    assert "model" in optimise.metrics()[0]


def test_a_stopped_recipe_goes_on_and_ends_with_the_same_weights(finished: Path, tmp_path: Path) -> None:
    whole = (Run.open(finished / "03-optimise").result() or {})["fingerprint"]
    cut = tmp_path / "rlhf"
    shutil.copytree(finished, cut)
    shutil.rmtree(cut / "03-optimise")
    for stage in ("01-imitate", "02-judge"):  # the last weights are handed on, and not the best
        result = json.loads((cut / stage / "result.json").read_text())
        (cut / stage / "result.json").write_text(
            json.dumps({**result, "best": {**result["best"], "step": 0}})
        )
    again = pp.train(resume=cut, progress=Progress())
    assert again.run == cut / "03-optimise"
    assert json.loads((again.run / "result.json").read_text())["fingerprint"] == whole


def test_the_judge_is_a_sequence_classifier(finished: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = last_model(finished / "02-judge")
    ours = ValueModel.load(folder)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokens = torch.tensor([ours.trunk.tokenizer.encode("6b=(acac)")])
    with torch.no_grad():
        expected = theirs(tokens).logits[0, 0]
        states = ours.trunk.model.hidden(tokens, torch.arange(tokens.shape[1])[None])
        found = ours.head(states[0, -1])[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_folder_holds_one_recipe(finished: Path) -> None:
    with pytest.raises(PanoplyError, match="holds another recipe, or this one with other choices"):
        pp.train("rlhf", run=finished, settings={**SMALL, "run.held_out": 9}, threads=1, progress=Progress())


def test_settings_name_a_stage(tmp_path: Path) -> None:
    with pytest.raises(PanoplyError, match="Unknown stage of this recipe 'update'"):
        pp.train("rlhf", run=tmp_path / "x", settings={"update.lr": 1.0}, progress=Progress())


def test_stages_can_only_start_from_earlier_ones() -> None:
    with pytest.raises(PanoplyError, match="Stage 'a' starts from 'b', which is not an earlier stage"):
        Recipe((Stage("a", "sft", options={"model": "@b"}), Stage("b", "sft")))
    with pytest.raises(PanoplyError, match="Unknown earlier stage 'c'"):
        Recipe((Stage("a", "sft"), Stage("b", "sft", options={"model": "@c"})))
    recipe = Recipe((Stage("a", "sft"), Stage("b", "grpo", options={"model": "@a"})))
    assert recipe.but("b", method="rloo").stages[1].method == "rloo"
    with pytest.raises(PanoplyError, match="Unknown stage"):
        recipe.but("c", method="rloo")


def test_all_stages_are_checked_before_any_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for settings, sentence in (
        ({"optimise.sample.promts": 3}, r"Stage optimise \(ppo\): .*Did you mean 'prompts'"),
        ({"judge.update.lr": -1}, r"Stage judge \(reward-model\): .*lr must be above 0"),
    ):
        with pytest.raises(PanoplyError, match=sentence):
            pp.train("rlhf", settings=settings, progress=Progress())
    with pytest.raises(PanoplyError, match="Unknown sink"):
        pp.train("rlhf", sinks=("paper",), progress=Progress())
    assert not any(tmp_path.iterdir())


def test_a_recipe_whose_first_stage_cannot_begin_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise PanoplyError("No.")

    monkeypatch.setattr(Job, "begin", refuse)
    with pytest.raises(PanoplyError, match="No"):
        pp.train("rlhf", run=tmp_path / "x", settings=SMALL, threads=1, progress=Progress())
    assert not any(tmp_path.iterdir())


def test_the_plan_of_a_recipe_follows_the_choices() -> None:
    settings = {"optimise.sample.prompts": "3", "world.noise": "0.5"}
    stages = pp.plan_recipe("rlhf", seed=4, settings=settings)
    assert list(stages) == ["imitate", "judge", "optimise"]
    assert {made.options.seed for made in stages.values()} == {4}
    assert {made.world_options["noise"] for made in stages.values()} == {0.5}
    assert stages["optimise"].method.settings()["sample.prompts"] == 3
    assert stages["optimise"].method.settings()["models.reward_model.folder"] == "@judge"
    assert stages["imitate"].options.steps == 100


def test_stages_are_listed_among_the_runs(finished: Path) -> None:
    found = RunIndex(finished.parent).find()
    assert found == [f"rlhf/{name}" for name in ("01-imitate", "02-judge", "03-optimise")]


class TestChoices:
    """Of the same thing the user's word for one stage counts, then his word for all, then the recipe's."""

    @pytest.mark.parametrize(
        ("choices", "steps"),
        [
            ({"settings": {"imitate.run.steps": "7"}}, (7, None, None)),
            ({"settings": {"run.steps": 5}}, (5, 5, 5)),
            ({"steps": 6}, (6, 6, 6)),
            ({"steps": 6, "settings": {"imitate.run.steps": 7}}, (7, 6, 6)),
            ({"settings": {"run.steps": 5, "judge.run.steps": 8}}, (5, 8, 5)),
        ],
    )
    def test_options_of_the_run(self, choices: dict[str, Any], steps: tuple[int | None, ...]) -> None:
        plain, chosen = pp.plan_recipe("rlhf"), pp.plan_recipe("rlhf", **choices)
        assert plain["imitate"].options.steps == 100
        wanted = [n or made.options.steps for n, made in zip(steps, plain.values(), strict=True)]
        assert [made.options.steps for made in chosen.values()] == wanted

    def test_the_world_and_slots(self) -> None:
        settings = {"judge.world.noise": "0.5", "imitate.update": "sgd", "optimise.update.lr": 3e-4}
        plans = pp.plan_recipe("rlhf", settings=settings)
        assert [made.world_options.get("noise") for made in plans.values()] == [None, 0.5, None]
        assert plans["imitate"].method.settings()["update"] == "sgd"
        assert plans["optimise"].method.settings()["update.lr"] == 3e-4

    def test_a_run_is_trained_as_it_was_planned(self, finished: Path) -> None:
        stages = ("01-imitate", "02-judge", "03-optimise")
        assert [Run.open(finished / n).plan().options.steps for n in stages] == [1, 2, 2]

    def test_which_stage_starts_from_which_stays(self, tmp_path: Path) -> None:
        plans = pp.plan_recipe("rlhf", model="fresh", settings={"judge.run.model": "start"})
        assert [made.options.model for made in plans.values()] == ["fresh", "start", "fresh"]

    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            ({"imitat.run.steps": 7}, "Unknown stage of this recipe 'imitat'. Did you mean 'imitate'?"),
            (
                {"imitate.run.stepz": 7},
                "Stage imitate (sft): Unknown run setting 'stepz'. Did you mean 'steps'?",
            ),
            ({"judge.world.nose": 7}, "Did you mean 'noise'?"),
            ({"imitate": 7}, "Name a setting of 'imitate', such as imitate.run.steps=10."),
            ({"world": 7}, "Name a setting of 'world', such as imitate.run.steps=10."),
        ],
    )
    def test_what_there_is_not(self, settings: dict[str, Any], sentence: str) -> None:
        with pytest.raises(PanoplyError) as refused:
            pp.plan_recipe("rlhf", settings=settings)
        assert sentence in str(refused.value)

    def test_no_steps_are_refused_as_in_any_run(self) -> None:
        with pytest.raises(PanoplyError, match=r"run\.steps must be at least 1, not 0"):
            pp.plan_recipe("rlhf", steps=0)


def test_a_recipe_killed_while_it_wrote_its_folder_starts_again(tmp_path: Path) -> None:
    """What is left of the file is removed; what else may be there is not taken for it."""
    folder = tmp_path / "rlhf"
    folder.mkdir()
    (folder / ".recipe.json.123").write_text('{"choi')
    assert pp.train("rlhf", run=folder, settings=SMALL, threads=1, progress=Progress()).run.is_dir()
    names = ["01-imitate", "02-judge", "03-optimise", "recipe.json"]
    assert sorted(p.name for p in folder.iterdir()) == names
    (tmp_path / ".notes").touch()
    with pytest.raises(PanoplyError, match="is not empty and holds no recipe"):
        pp.train("rlhf", run=tmp_path, settings=SMALL, threads=1, progress=Progress())


def test_only_stages_that_sample_are_told_of_samplers() -> None:
    spread: dict[str, Any] = {"samplers": 2, "staleness": 1, "cluster": "threads"}
    made = pp.plan_recipe("rlhf", **spread)
    assert {name: one.options.samplers for name, one in made.items()} == {
        "imitate": 0,
        "judge": 0,
        "optimise": 2,
    }
    assert made["optimise"].options.staleness == 1
    assert made["imitate"].options.cluster != "threads"
    made = pp.plan_recipe("rlhf", **spread, learners=2)
    assert {one.options.learners for one in made.values()} == {2}
    assert made["judge"].options.cluster == "threads"
    data = Recipe((Stage("one", "sft"), Stage("two", "sft", options={"model": "@one"})))
    with pytest.raises(PanoplyError, match=r"--samplers has no effect: no stage of"):
        plan_stages("two@1", data, spread, pp.plan)
    with pytest.raises(PanoplyError, match=r"--engine has no effect: no stage of"):
        plan_stages("two@1", data, {"settings": {"run.engine": "vllm"}}, pp.plan)
    assert len(plan_stages("two@1", data, {"engine": "native"}, pp.plan)) == 2
    with pytest.raises(PanoplyError, match="sft@1 samples nothing"):
        pp.plan_recipe("rlhf", settings={"imitate.run.samplers": 2})


def test_a_recipe_on_threads_is_that_of_one_process(finished: Path, tmp_path: Path) -> None:
    pp.train(
        "rlhf", run=tmp_path / "rlhf", settings=SMALL, threads=1, progress=Progress(),
        learners=2, samplers=2, cluster="threads",
    )  # fmt: skip
    # later stages begin with weights that differ by rounding already
    for stage, most in {"01-imitate": 1e-6, "02-judge": 1e-6, "03-optimise": 1e-5}.items():
        one, two = (Run.open(f / stage).metrics() for f in (finished, tmp_path / "rlhf"))
        for a, b in zip(one, two, strict=True):
            assert [a["loss"], a["gradient_norm"]] == pytest.approx(
                [b["loss"], b["gradient_norm"]], rel=most, abs=most
            )
