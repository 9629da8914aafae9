"""Questions about a row or a column of a grid, against examples worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.text.grids import Grids
from panoply.worlds.world import Task

CELLS = "0110" + "1001" + "1100" + "0101"


def task_of(world: Grids, line: str, number: int) -> Task:
    prompt = tuple(world.tokens(f"{CELLS}{line}{number}="))
    return Task(1, prompt, 0, {"cells": CELLS, "line": line, "number": number})


def test_the_reference_writes_what_it_looks_at() -> None:
    world = Grids()
    assert world.text(world.gold(task_of(world, "r", 1))) == "<1001>2$"
    assert world.text(world.gold(task_of(world, "c", 1))) == "<1011>3$"
    assert len(world.gold(task_of(world, "c", 3))) == world.max_tokens == 8


@pytest.mark.parametrize(
    ("answer", "success", "looked", "ended"),
    [
        ("<1001>2$", 1, 1, 1),
        ("<____>2$", 1, 1, 1),
        ("2$", 1, 0, 1),
        ("<1001>3$", 0, 1, 1),
        ("<100>2$", 0, 1, 1),
        ("<10012$", 0, 1, 1),
        ("2<1001>2$", 0, 1, 1),
        ("<1001>22$", 0, 1, 1),
        ("<1001>2", 0, 0, 0),
        ("$", 0, 0, 1),
    ],
)
def test_only_the_number_counts(answer: str, success: float, looked: float, ended: float) -> None:
    world = Grids()
    found = world.grade(task_of(world, "r", 1), world.tokens(answer))
    assert found == {"success": success, "looked": looked, "ended": ended}


def test_the_teacher_looks_at_the_next_and_after_the_last_at_the_first() -> None:
    world, rng = Grids(), np.random.default_rng(0)
    said = [world.text(world.demonstrate(task_of(world, "r", 3), rng)) for _ in range(2000)]
    assert set(said) == {"<0101>2$", "<0110>2$"}
    assert said.count("<0110>2$") / 2000 == pytest.approx(0.65, abs=0.04)


def test_problems_are_many_and_split() -> None:
    world = Grids()
    tests = {world.task("test", index).id for index in range(200)}
    assert len(tests) > 190
    assert not tests & {world.task("train", index).id for index in range(400)}
    Grids(side=2).self_test(8)
    world.self_test(16)
    with pytest.raises(PanoplyError, match="from 2 to 8"):
        Grids(side=9)
