"""Counted copies, against examples worked out by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.text.copies import Copies
from panoply.worlds.world import Task


def task_of(world: Copies, n: int, word: str) -> Task:
    problem = f"{n:02d}{word}="
    return Task(1, tuple(world.tokens(problem)), n, {"problem": problem, "copies": n, "word": word})


def test_the_reference_counts_down() -> None:
    world = Copies()
    assert world.text(world.gold(task_of(world, 3, "ab"))) == "ab02ab01ab00$"
    assert world.text(world.gold(task_of(world, 11, "qz"))).startswith("qz10qz09qz08")
    assert len(world.gold(task_of(world, 16, "aa"))) == world.max_tokens == 65


@pytest.mark.parametrize(
    ("answer", "success", "copied", "ended"),
    [
        ("ab02ab01ab00$", 1, 1, 1),
        ("ab02ab01ab00", 0, 1, 0),
        ("ab02ab01$", 0, 2 / 3, 1),
        ("ab02ab00$", 0, 1 / 3, 1),
        ("ab02ac01ab00$", 0, 1 / 3, 1),
        ("ab02ab01ab00ab$", 0, 1, 1),
        ("ab02ab01ab00$$", 0, 1, 0),
        ("$", 0, 0, 1),
        ("", 0, 0, 0),
    ],
)
def test_grades(answer: str, success: float, copied: float, ended: float) -> None:
    world = Copies()
    found = world.grade(task_of(world, 3, "ab"), world.tokens(answer))
    assert found == {"success": success, "copied": pytest.approx(copied), "ended": ended}


def test_the_teacher_stops_too_early() -> None:
    world = Copies()
    rng = np.random.default_rng(0)
    said = Counter(len(world.demonstrate(task_of(world, 3, "ab"), rng)) // 4 for _ in range(4000))
    assert said[1] / 4000 == pytest.approx(0.45, abs=0.03)
    assert said[2] / 4000 == pytest.approx(0.55 * 0.45, abs=0.03)
    tasks = [world.task("train", index) for index in range(4000)]
    right = [world.grade(task, world.demonstrate(task, rng))["success"] for task in tasks]
    assert np.mean(right) == pytest.approx(0.19, abs=0.02)


def test_short_answers_are_the_most_frequent() -> None:
    world = Copies()
    tasks = [world.task("train", index) for index in range(8000)]
    drawn = Counter(task.level for task in tasks)
    assert set(drawn) == set(range(2, 17))
    assert drawn[2] / drawn[8] == pytest.approx(4, rel=0.2)
    assert np.mean([len(world.gold(task)) for task in tasks]) == pytest.approx(26, abs=1)


def test_splits_never_meet_and_hints_are_whole_copies() -> None:
    world = Copies()
    train, test = ({world.task(split, i).id for i in range(4000)} for split in ("train", "test"))
    assert not train & test
    assert len(world.held_out(512)) == 512
    hinted = world.hint(task_of(world, 4, "ab"), 0.5)
    assert world.text(hinted.given) == "ab03ab02"
    assert world.text(world.gold(hinted)) == "ab01ab00$"
    assert world.grade(hinted, world.gold(hinted))["success"] == 1
    assert world.demonstrate(hinted, np.random.default_rng(0))[-1:] == world.tokens("$")
    world.self_test(32)


def test_a_range_has_the_fewest_first() -> None:
    with pytest.raises(PanoplyError, match="fewest first, not 5 to 3"):
        Copies(copies=(5, 3))
    with pytest.raises(PanoplyError, match="from 1 to 99"):
        Copies(copies=(2, 100))
    Copies(copies=(1, 1)).self_test(8)
