"""SPARKLE: axes by hand on planted students, what a run's table says, and hard problems opened in versions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hinting import Scripted, given_steps
from tiny import Notes, bare

import panoply as pp
from panoply import data_folder
from panoply.errors import PanoplyError
from panoply.evaluation.axes import axes, means, parts_solved, shuffled
from panoply.methods.reasoning_data.sparkle import flags, measure, opened, sparkle_rl, student
from panoply.worlds.text.chain import Chain
from panoply.worlds.world import Task

WORLD = Chain(operations=4, levels=(2, 4))
TASKS = [WORLD.task("test", i) for i in range(4)]


def begins_with(task: Task, kind: str) -> bool:
    told = [token for piece in WORLD.aid(task, kind) for token in piece]
    return list(task.prompt[: len(told)]) == told


# ------------------------------------------------------------------ the axes


def test_the_axes_of_a_student_who_needs_knowledge_by_hand() -> None:
    """Right with the facts before the problem and only then: Δ is 1, and 0 for a plan or for the facts shuffled."""

    def ask(tasks: Sequence[Task]) -> list[list[int]]:
        return [WORLD.gold(t) if begins_with(t, "knowledge") else [0] for t in tasks]

    found = means(axes(WORLD, ask, TASKS))
    assert found == {
        "success": 0.0,
        "Δ plan": 0.0,
        "Δ shuffled plan": 0.0,
        "Δ knowledge": 1.0,
        "Δ shuffled knowledge": 0.0,
        "sub-problems": 0.0,
        "all of them": 0.0,
    }
    assert flags(found) == {"knowledge"}


def test_a_student_whom_any_text_confuses_is_hurt_by_the_control_as_much() -> None:
    def ask(tasks: Sequence[Task]) -> list[list[int]]:
        bare = {task.prompt for task in TASKS}
        return [WORLD.gold(t) if t.prompt in bare or t.given else [0] for t in tasks]

    found = means(axes(WORLD, ask, TASKS))
    assert found["success"] == 1
    for kind in ("plan", "knowledge"):
        assert found[f"Δ {kind}"] == found[f"Δ shuffled {kind}"] == -1
    assert (found["sub-problems"], found["all of them"]) == (1, 1)
    assert flags(found) == set()


def test_sub_problems_are_asked_after_the_right_answers_before_them() -> None:
    """The second step is always wrong: three of four are solved of each, and never all."""
    asked: list[int] = []

    def ask(tasks: Sequence[Task]) -> list[list[int]]:
        asked.extend(len(task.given) for task in tasks)
        return [[0] * 3 if len(task.given) == 3 else WORLD.gold(task)[:3] for task in tasks]

    assert parts_solved(WORLD, ask, TASKS) == [[True, False, True, True]] * 4
    assert asked == [0, 3, 6, 9] * 4
    found = means(axes(WORLD, ask, TASKS))
    assert (found["sub-problems"], found["all of them"]) == (0.75, 0.0)
    assert all(WORLD.gold(task)[:3] != [0] * 3 for task in TASKS)


def test_a_shuffled_aid_has_the_same_tokens_and_the_problem_stays() -> None:
    task = TASKS[0]
    other, aided = shuffled(WORLD, task, "plan"), WORLD.aided(task, "plan")
    assert sorted(other.prompt) == sorted(aided.prompt)
    assert other.prompt[-len(task.prompt) :] == task.prompt
    assert other.prompt != aided.prompt
    assert other == shuffled(WORLD, task, "plan")


def test_planted_students_are_told_apart() -> None:
    assert [measure(seed, problems=48)["found − suspected"] for seed in (1001, 1002)] == [1, 1]
    world = Chain(operations=6)
    found = means(axes(world, student(world, "steps", 1001), [world.task("test", i) for i in range(48)]))
    assert flags(found) == {"steps"}
    assert found["sub-problems"] == pytest.approx(0.9, abs=0.06)


# ------------------------------------------------------------------ opened problems


def rows_of(collect: Scripted, number: int) -> list[dict[str, Any]]:
    places = [collect.place(i) for i in range(number)]
    return [{"task": p, "id": collect.task(p).id, "prompt": "", "numbers": {"rate": 0.0}} for p in places]


def test_every_version_of_every_problem_has_a_group_of_its_own(tmp_path: Path) -> None:
    """Two problems in five versions of 0, 2, 4, 6 and 8 steps: ten prompts, each once, and no loss on hints."""
    collect = Scripted(lambda number, steps, at: steps == 8 or (steps == 4 and at % 2 == 0))
    data_folder.write(tmp_path, rows_of(collect, 2))
    part = opened(folder=str(tmp_path), prompts=10, group=2)
    found = part(collect)
    assert sorted(set(collect.asked[0])) == [(n, steps) for n in (0, 1) for steps in (0, 2, 4, 6, 8)]
    shown = given_steps(found, collect.world)
    assert len(shown) == 10
    assert all(len(set(steps)) == 1 for steps in shown.values())
    assert bool((found["position"] >= found.context["shared"][found["context"]]).all())
    assert collect.notes == {"hint_share": 0.5, "opened_degenerate": 1.0}
    part(collect)
    assert sorted(collect.asked[1]) == sorted(collect.asked[0]), "then all of them once more"
    assert collect.asked[1] != collect.asked[0]


@pytest.mark.parametrize(("most", "steps"), [(0, {0}), (2, {0, 2, 4})])
def test_fewer_versions(most: int, steps: set[int]) -> None:
    """Without a folder: the world's own problems, one version of each in turn."""
    collect = Scripted(lambda number, steps, at: True)
    opened(prompts=6, group=2, most=most)(collect)
    assert {given for _, given in collect.asked[0]} == steps
    assert len({number for number, _ in collect.asked[0]}) == 6


# ------------------------------------------------------------------ runs

SMALL = {
    "first.run.steps": 1,
    "second.run.steps": 2,
    "hard.prompts": 6,
    "hard.answers": 2,
    "world.operations": 3,
    "run.held_out": 4,
    "run.device": "cpu",
    "first.sample.prompts": 2,
    "first.sample.group": 2,
    "second.sample.prompts": 4,
    "second.sample.group": 2,
}


def test_the_recipe_and_its_diagnosis(tmp_path: Path) -> None:
    """New weights solve nothing, so all problems are hard; the last run's table has three axes, before and after."""
    assert [stage.name for stage in sparkle_rl().stages] == ["first", "hard", "second"]
    made = bare(tmp_path / "recipe", "sparkle-rl", model="fresh", settings=SMALL)
    last = sorted((tmp_path / "recipe").glob("*-second"))[-1]
    rows = data_folder.read(str(sorted((tmp_path / "recipe").glob("*-hard"))[-1]), "task")
    assert len(rows) == 6
    assert {row["numbers"]["rate"] for row in rows} == {0.0}
    assert made is not None
    table = pp.judge(last, "sparkle", settings={"problems": "4"})
    assert {"start", "trained"} <= table.keys()
    assert {"success", "Δ plan", "Δ knowledge", "sub-problems", "all of them"} <= table["trained"].keys()


def test_refusals(tmp_path: Path) -> None:
    for settings, said in (
        ({"sample.most": 5}, "4 chunks"),
        ({"sample.chunks": 0}, "at least 1"),
        ({"sample.most": 0, "sample.chunks": 3}, "no hint is given"),
    ):
        with pytest.raises(PanoplyError, match=said):
            pp.plan("sparkle-rl-alone", "chain", settings=settings)
    with pytest.raises(PanoplyError, match="'hint'"):
        pp.plan("sparkle-rl-alone", "manyanswers")


def test_a_pool_without_a_failing_prompt_and_a_world_without_plans(tmp_path: Path) -> None:
    with pytest.raises(PanoplyError, match="easier or harder"):
        data_folder.write(tmp_path, [])
    run = bare(
        tmp_path / "run",
        "grpo",
        world="copies",
        model="fresh",
        steps=1,
        progress=Notes(),
        settings={"sample.prompts": 1, "sample.group": 2, "run.held_out": 2, "run.device": "cpu"},
    )
    with pytest.raises(PanoplyError, match="copies has no knowledge and no plan"):
        pp.judge(run.run, "sparkle")
