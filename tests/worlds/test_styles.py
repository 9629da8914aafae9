"""Chains in four styles, against examples worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.text.styles import STYLES, Styles
from panoply.worlds.world import Task


def task_of(world: Styles, problem: str) -> Task:
    return Task(1, tuple(world.tokens(problem + "=")), problem.count("*"), {"problem": problem})


def test_each_style_by_hand() -> None:
    world = Styles(operations=2)
    task = task_of(world, "3+4*2")
    assert {style: world.text(world.gold(task, style)) for style in STYLES} == {
        "A": "A+47*24=4$",
        "B": "B4+72*4=4$",
        "C": "C3+477*24=4$",
        "D": "D+eh*ce=4$",
    }
    assert world.solutions(task) == [world.gold(task, style) for style in STYLES]
    assert world.text(world.gold(task)) == "A+47*24=4$"
    assert [world.text(said) for said in world.conclusion(task)] == ["=", "4$"]


@pytest.mark.parametrize(
    ("answer", "success", "worked", "final", "ended"),
    [
        ("B4+82*6=6$", 1, 1, 1, 1),
        ("D+ei*cg=6$", 1, 1, 1, 1),
        ("A+48*26=6$", 0, 1, 1, 1),
        ("B4+82*0=0$", 0, 0, 0, 1),
        ("B4+82*6=6", 0, 0, 0, 0),
        ("B4+82*0=6$", 0, 0, 1, 1),
        ("C+48*26=6$", 0, 0, 1, 1),
        ("D+48*26=6$", 0, 0, 1, 1),
        ("=6$", 0, 0, 1, 1),
        ("$", 0, 0, 0, 1),
        ("", 0, 0, 0, 0),
    ],
)
def test_grades_where_style_a_is_a_trap(
    answer: str, success: float, worked: float, final: float, ended: float
) -> None:
    world = Styles(operations=2)
    task = task_of(world, "4+4*2")
    found = world.grade(task, world.tokens(answer))
    assert found == {"success": success, "worked": worked, "final": final, "ended": ended}
    assert world.part_of(task) == "trapped"
    assert world.text(world.gold(task)).startswith("B")
    assert [world.text(s)[0] for s in world.solutions(task)] == ["B", "C", "D"]


def test_without_traps_every_style_is_right_everywhere() -> None:
    world = Styles(operations=2, traps=False)
    task = task_of(world, "4+4*2")
    assert all(world.grade(task, answer)["success"] for answer in world.solutions(task))
    assert len(world.solutions(task)) == 4
    assert world.part_of(task) == "plain"


def test_the_careless_teacher_has_its_habits() -> None:
    world, rng = Styles(), np.random.default_rng(0)
    tasks = [world.task("train", index) for index in range(4000)]
    said = [world.demonstrate(task, rng) for task in tasks]
    styles = [world.text(answer)[0] for answer in said]
    assert {s: styles.count(s) / 4000 for s in STYLES} == pytest.approx(
        {"A": 0.7, "B": 0.15, "C": 0.15, "D": 0}, abs=0.02
    )
    graded = [world.grade(task, answer)["success"] for task, answer in zip(tasks, said, strict=True)]
    assert np.mean(graded) == pytest.approx(0.26, abs=0.02)
    slipped = Styles(operations=2, slip=1.0).demonstrate(task_of(world, "3+4*2"), rng, style="B")
    assert world.text(slipped) == "B4+72*9=9$", "a product done as a sum"
    assert {world.text(world.demonstrate(tasks[0], rng, "D"))[0] for _ in range(9)} == {"D"}


def test_splits_never_meet_and_levels_are_drawn_alike() -> None:
    world = Styles(levels=(4, 6))
    tasks = [world.task("train", index) for index in range(3000)]
    assert not {t.id for t in tasks} & {world.task("test", index).id for index in range(3000)}
    assert [sum(t.level == n for t in tasks) / 3000 for n in (4, 5, 6)] == pytest.approx(
        [1 / 3] * 3, abs=0.03
    )
    assert all(t.data["problem"].count("*") == t.level for t in tasks)
    assert len(world.held_out(512)) == 512
    world.self_test(32)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PanoplyError, match="within 0 to 6, the operations, not 5 to 7"):
        Styles(levels=(5, 7))
    with pytest.raises(PanoplyError, match="each of the styles A, B, C, D, 1 in all, unlike 0.5, 0.5"):
        Styles(habit=(0.5, 0.5))
    with pytest.raises(PanoplyError, match="1 in all"):
        Styles(habit=(0.5, 0.5, 0.5, 0))
