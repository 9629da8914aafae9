"""Look-ups in one turn, against examples worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.text.hops import Hops
from panoply.worlds.world import Task

TABLE = {"a": "d", "b": "a", "c": "e", "d": "b", "e": "b", "f": "a"}


def task_of(world: Hops, start: str, hops: int) -> Task:
    problem = "".join(k + v for k, v in TABLE.items()) + f",{start}{hops}="
    data = {"problem": problem, "table": TABLE, "start": start, "hops": hops}
    return Task(1, tuple(world.tokens(problem)), hops, data)


def test_the_reference_writes_hops_down_while_there_is_room() -> None:
    world = Hops()
    assert world.text(world.gold(task_of(world, "c", 1))) == "#e$"
    assert world.text(world.gold(task_of(world, "c", 3))) == "eb#a$"
    assert world.text(world.gold(task_of(world, "c", 4))) == "eba#d$"
    assert world.text(world.gold(task_of(world, "c", 5))) == "eba#b$", (
        "the fourth hop, to d, is made in the head"
    )
    assert len(world.gold(task_of(world, "c", 5))) == world.max_tokens == 6


@pytest.mark.parametrize(
    ("answer", "success", "thoughts", "ended"),
    [
        ("eb#a$", 1, 2, 1),
        ("#a$", 1, 0, 1),
        ("fff#a$", 1, 3, 1),
        ("ffff#a$", 0, 4, 1),
        ("eb#b$", 0, 2, 1),
        ("eb#a#$", 0, 2, 1),
        ("#eb#a$", 0, 0, 1),
        ("eba$", 0, 4, 1),
        ("eb#a", 0, 2, 0),
        ("", 0, 0, 0),
    ],
)
def test_only_the_letter_after_one_marker_counts(
    answer: str, success: float, thoughts: float, ended: float
) -> None:
    world = Hops()
    found = world.grade(task_of(world, "c", 3), world.tokens(answer))
    assert found == {"success": success, "thoughts": thoughts, "ended": ended}


def test_the_teacher_loses_count() -> None:
    world, rng = Hops(), np.random.default_rng(0)
    said = [world.text(world.demonstrate(task_of(world, "c", 3), rng)) for _ in range(2000)]
    assert set(said) == {"eb#a$", "e#b$"}
    assert said.count("e#b$") / 2000 == pytest.approx(0.6, abs=0.04)


def test_problems_are_many_differ_and_are_split() -> None:
    world = Hops()
    tests = [world.task("test", index) for index in range(200)]
    trains = {world.task("train", index).id for index in range(400)}
    assert len({task.id for task in tests}) > 190
    assert not trains & {task.id for task in tests}
    assert {task.level for task in tests} == {2, 3, 4, 5}
    for task in tests:
        assert all(letter != to for letter, to in task.data["table"].items()), "nothing leads to itself"
        assert world.text(task.prompt) == task.data["problem"]


def test_settings_that_cannot_be_are_refused() -> None:
    world = Hops(hops=(1, 1), letters=3, thoughts=0)
    world.self_test(8)
    assert world.max_tokens == 3
    with pytest.raises(PanoplyError, match="fewest first"):
        Hops(hops=(5, 3))
    with pytest.raises(PanoplyError, match="from 3 to 12"):
        Hops(letters=2)
    Hops().self_test(16)
