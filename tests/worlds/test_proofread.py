"""Solutions whose first wrong step is asked for, against ones written out."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.text.proofread import Proofread
from panoply.worlds.world import Task


def solving(world: Proofread, problem: str) -> Task:
    return Task(1, tuple(world._tokens(problem)), 0, {"problem": problem})


@pytest.mark.parametrize(
    ("trace", "first"),
    [
        ("+47*24", 0),
        ("+47*25", 2),
        ("+48*26", 1),  # the second follows from what is written
        ("+48*24", 1),
        ("+57*24", 1),
    ],
)
def test_the_first_wrong_step(trace: str, first: int) -> None:
    world = Proofread(operations=2, levels=(0, 2))
    task = world.check_of(solving(world, "3+4*2="), trace)
    assert world._text(task.prompt) == f"?3+4*2={trace};"
    assert task.data["first"] == first
    gold = f"{first or '.'}$"
    assert world._text(world.gold(task)) == gold
    assert world.grade(task, world._tokens(gold))["success"] == 1
    assert world.located(world._tokens(gold)) == first
    for wrong in ("", gold[0], gold + "$", "$", "3$", ".$" if first else "1$"):
        assert world.grade(task, world._tokens(wrong))["success"] == 0


def test_what_names_nothing() -> None:
    world = Proofread(operations=2, levels=(0, 2))
    assert [world.located(world._tokens(text)) for text in ("", ".", "$", "0$", "3$", "12$", "+$")] == [
        None
    ] * 7
    assert world.scores(solving(world, "3+4*2="), world._tokens(".$")) == [1.0]
    assert world.scores(solving(world, "3+4*2="), world._tokens("2$")) == [0.0]
    assert world.scores(solving(world, "3+4*2="), world._tokens("2")) is None


def test_own_answers_are_put_to_it_without_whether_they_are_right() -> None:
    world = Proofread(operations=2, levels=(0, 2))
    task = solving(world, "3+4*2=")
    asked = world.referee(task, [world._tokens("+47*25$")])
    assert asked is not None
    assert world._text(asked.prompt) == "?3+4*2=+47*25;"
    right = world.referee(task, [world._tokens("+47*24$")])
    assert right is not None
    assert len(right.prompt) == len(asked.prompt), "a prompt does not tell"
    for odd in ("+47*2", "+47*24", "+47$", "+4;*24$", "+4$*24$", "++7*24$", "+47*24$$"):
        assert world.referee(task, [world._tokens(odd)]) is None
    assert world.referee(asked, [world._tokens("2$")]) is None


def test_half_of_the_solutions_are_sound_and_faults_lie_anywhere() -> None:
    world = Proofread()
    first = Counter(task.data["first"] for task in world.checks(800))
    assert first[0] / 800 == pytest.approx(0.5, abs=0.06)
    assert all(0.06 < first[step] / 800 < 0.19 for step in (1, 2, 3, 4))
    assert set(first) == {0, 1, 2, 3, 4}
    assert {task.data["first"] for task in Proofread(kinds=("check",)).held_out(64)} == {0, 1, 2, 3, 4}


def test_the_teacher_checks_as_carelessly_as_it_solves() -> None:
    world = Proofread(operations=2, levels=(0, 2), slip=1.0)
    rng = np.random.default_rng(0)
    sound = world.check_of(solving(world, "3+4*2="), "+47*24")
    assert world._text(world.demonstrate(sound, rng)) == "2$", "7 times 2 is taken for a 9"
    wrong = world.check_of(solving(world, "3+4*2="), "+47*29")
    assert world._text(world.demonstrate(wrong, rng)) == ".$"
    sums = world.check_of(solving(world, "3+4+2="), "+47+28")
    assert world._text(world.demonstrate(sums, rng)) == "2$"
    careful = Proofread(slip=0.0)
    assert all(careful.demonstrate(t, rng) == careful.gold(t) for t in careful.checks(64))
    asked = Counter(
        world._text(world.lessons(world.task("train", i), rng)[0][0])[0] == "?" for i in range(400)
    )
    assert asked[True] / 400 == pytest.approx(0.5, abs=0.08)


def test_kinds_splits_and_self_tests() -> None:
    both = Proofread(kinds=("solve", "check"))
    both.self_test(16)
    assert [both.part_of(both.task("train", i)) for i in range(4)] == ["solve", "check"] * 2
    assert "domain" in both.keys
    assert "domain" not in Proofread().keys
    problems = [{both.task(split, i).data["problem"] for i in range(1500)} for split in ("train", "test")]
    assert not problems[0] & problems[1]
    with pytest.raises(PanoplyError, match="kind of problem in proofread"):
        Proofread(kinds=("sing",))
    with pytest.raises(PanoplyError, match="names no kind"):
        Proofread(kinds=())
    with pytest.raises(PanoplyError, match="from 1 to 9"):
        Proofread(operations=10, levels=(0, 2))
