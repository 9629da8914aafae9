"""Stages that make data: of a policy's answers, by how hard tasks are, and judged anew; and the runs that take it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

import panoply as pp
from panoply import data_folder, registry
from panoply.data_folder import Row
from panoply.errors import PanoplyError
from panoply.loops.making import Maker
from panoply.parts import part
from panoply.progress import Progress
from panoply.recipes import Recipe, Stage
from panoply.rollout.collector import in_epochs
from panoply.run import Run
from panoply.slots.data.stored import stored
from panoply.slots.make.answers import answered_by, bucket, relabel, solved_by
from panoply.which import take
from panoply.worlds.text.chain import Chain

SHORT = {"run.held_out": 4, "run.steps": 1, "run.evaluate_every": 0, "world.operations": 6}


def carry_out(folder: Path, *stages: Stage, rounds: int = 1, **choices: Any) -> list[Path]:
    registry.recipe("toy-made@1")(lambda: Recipe(stages, rounds=rounds))
    common: dict[str, Any] = {"world": "chain", "threads": 1, "progress": Progress(), "settings": SHORT}
    pp.train("toy-made", run=folder, **{**common, **choices})
    return sorted(folder.glob("0*"))


def rows(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]


def test_expert_iteration(tmp_path: Path, registries: None) -> None:
    """Answer, keep what is right, imitate it from the start's weights; then again, with the better policy's answers."""
    made = carry_out(
        tmp_path / "a",
        Stage("solved", make=solved_by(policy="@last", prompts=24, answers=4, most=2)),
        Stage("imitate", "sft", {"data": "stored", "data.folder": "@solved"}, again={"model": "start"}),
        rounds=2,
        settings={**SHORT, "imitate.data.batch": "4", "solved.answers": 3},
    )
    first, imitate, second, again = made
    world = Chain()
    for row in (*rows(first), *rows(second)):
        task = world.task("train", row["task"])
        assert world.grade(task, row["answer"])["success"] == 1.0
        assert row["prompt"] == task.data["problem"]
        assert row["text"] == world.tokenizer.decode(row["answer"])
    assert Run.open(first).plan().method.settings()["make.answers"] == 3
    assert {row["task"] for row in rows(first)}.isdisjoint(row["task"] for row in rows(second))
    taught = Run.open(second).plan().method.settings()["make.policy"]
    assert taught == str(take(imitate.resolve(), "last").model.parent)
    assert Run.open(again).plan().options.model == "start"
    assert tiny.metrics(imitate)[0]["decisions"] == 4 * 19
    prints = [tiny.result(folder)["fingerprint"] for folder in made]
    for folder in (second, again):
        (folder / "result.json").unlink()
    tiny.resume(tmp_path / "a")
    assert [tiny.result(folder)["fingerprint"] for folder in made] == prints


def test_tasks_by_how_often_they_are_solved(tmp_path: Path, registries: None) -> None:
    chosen, learned = carry_out(
        tmp_path / "a",
        Stage("chosen", make=bucket(prompts=24, answers=4, low=0.25, high=0.75)),
        Stage("learn", "grpo", {"sample": "among", "sample.folder": "@chosen", "sample.prompts": 3}),
    )
    assert 0 < len(rows(chosen)) < 24
    assert all(0.25 <= row["numbers"]["rate"] <= 0.75 for row in rows(chosen))
    ids = {row["id"] for row in rows(chosen)}
    seen = {episode["task"] for episode in Run.open(learned).episodes()}
    assert seen
    assert seen <= ids


@pytest.mark.parametrize("judge", ["success", "@judge"])
def test_answers_that_are_judged_anew_are_pairs(tmp_path: Path, judge: str, registries: None) -> None:
    made = carry_out(
        tmp_path / "a",
        Stage("judge", "reward-model", {"data": "preferences", "data.batch": 4}),
        Stage("told", make=answered_by(prompts=12, answers=3)),
        Stage("pairs", make=relabel(data="@told", judge=judge)),
        Stage("prefer", "dpo", {"data": "stored_pairs", "data.folder": "@pairs", "data.batch": 4}),
        world="strings",
        settings={"run.held_out": 4, "run.steps": 1, "run.evaluate_every": 0},
    )
    told = {(row["task"], tuple(row["answer"])): row["numbers"]["success"] for row in rows(made[1])}
    pairs = rows(made[2])
    assert pairs
    for row in pairs:
        assert row["numbers"]["gap"] > 0
        good, bad = (told[row["task"], tuple(row[side])] for side in ("chosen", "rejected"))  # type: ignore[literal-required]
        assert judge != "success" or (good, bad) == (1.0, 0.0)
    assert tiny.metrics(made[3])[0]["episodes"] == 8


def test_a_part_of_ones_own(tmp_path: Path, registries: None) -> None:
    @part("make", equation="the teacher's best", needs={"world:reference"})
    def golden(maker: Maker, *, tasks: int = 4) -> Iterator[Row]:
        """Reference answers to the first tasks."""
        for place in range(tasks):
            task = maker.world.task("train", place)
            yield {**maker.row(place, task, str), "answer": maker.world.gold(task)}

    data, learned = carry_out(
        tmp_path / "a",
        Stage("golden", make=golden(tasks=3)),
        Stage("imitate", "sft", {"data": "stored", "data.folder": "@golden", "data.batch": 3}),
        model="fresh",
    )
    assert [row["task"] for row in rows(data)] == [0, 1, 2]
    assert tiny.metrics(learned)[0]["success"] == 1.0


@pytest.mark.parametrize(
    ("stage", "sentence"),
    [
        (
            lambda: Stage("b", "sft", options={"model": "@a"}),
            "starts from 'a', which makes data and no model",
        ),
        (lambda: Stage("b", "sft", make=bucket()), "either trains a method or makes data"),
        (lambda: Stage("b", make=stored()), "made by a part of the slot make"),
        (lambda: Stage("b", make=bucket(), options={"steps": 3}), "its settings are those of make.bucket"),
        (lambda: Stage("b", make=relabel(data="@c")), "Unknown earlier stage 'c'"),
    ],
)
def test_stages_that_cannot_be(stage: Any, sentence: str) -> None:
    with pytest.raises(PanoplyError) as refused:
        Recipe((Stage("a", make=bucket()), stage(), Stage("z", "sft")))
    assert sentence in str(refused.value)


def test_what_is_refused_while_planning(registries: None) -> None:
    def planned(make: Any, **settings: Any) -> Any:
        stages = (Stage("made", make=make), Stage("z", "sft"))
        registry.recipe("toy-made@1")(lambda: Recipe(stages))
        return pp.plan_recipe("toy-made", "chain", settings={f"made.{k}": v for k, v in settings.items()})

    assert planned(bucket(), answers="3")["made"].method.settings()["make.answers"] == 3
    for make, settings, sentence in (
        (bucket(low=0.9, high=0.1), {}, "make.low cannot be 0.9: it is above bucket.high"),
        (
            bucket(),
            {"answer": 3},
            "Stage made (bucket): Unknown setting of make (bucket) 'answer'. Did you mean 'answers'?",
        ),
        (bucket(), {"run.steps": 3}, "made.run.steps has no effect: the stage made makes data"),
        (bucket(), {"make.prompts": 3}, "Unknown setting 'made.make.prompts'. Did you mean 'made.prompts'?"),
    ):
        with pytest.raises(PanoplyError) as refused:
            planned(make, **settings)
        assert sentence in str(refused.value)


def test_stored_data_is_for_the_world_it_was_made_in(tmp_path: Path) -> None:
    train = {"data": "stored", "progress": Progress(), "steps": 1, "threads": 1, "world": "chain"}
    data_folder.write(tmp_path, [{"task": 3, "id": 4, "prompt": "1+1=", "answer": [1]}])
    for folder, sentence in (
        ("", "Stored data is a folder with data.jsonl, which a make stage writes; no folder is none"),
        (str(tmp_path / "x"), "/x' is none"),
        (str(tmp_path), "made in another world than chain with"),
    ):
        with pytest.raises(PanoplyError, match=sentence):
            pp.train(
                "sft", run=tmp_path / "run", settings={"data.folder": folder, "run.held_out": 4}, **train
            )
    with pytest.raises(PanoplyError, match="has rows without 'chosen'"):
        data_folder.read(str(tmp_path), "chosen")
    with pytest.raises(PanoplyError, match="No row of data came out of it"):
        data_folder.write(tmp_path, [])


def test_every_epoch_has_everything_once() -> None:
    order = in_epochs(seed=1, first=0, n=15, among=5)
    assert [sorted(order[at : at + 5]) for at in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    assert order[:5] != order[5:10]
    assert order[3:12] == in_epochs(seed=1, first=3, n=9, among=5)
