"""The addition world, against examples worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.text.add import Add
from panoply.worlds.world import Task

SUM = "47+85="  # 7+5 = 12, 4+8+1 = 13: 132


def task_of(world: Add, problem: str) -> Task:
    return Task(1, tuple(world.tokens(problem)), 0, {"problem": problem})


@pytest.mark.parametrize(
    ("problem", "trace"),
    [
        (SUM, "75214831$"),
        ("32+52=", "22403580$"),  # 84, nothing carried
        ("99+99=", "99819991$"),  # 198
        ("508+697=", "875109015621$"),  # 15, 0+9+1 = 10, 5+6+1 = 12: 1205
        ("4+5=", "4590$"),
    ],
)
def test_the_reference_goes_column_by_column_from_the_right(problem: str, trace: str) -> None:
    world = Add(digits=problem.index("+"))
    assert world.gold(task_of(world, problem)) == world.tokens(trace)
    assert len(trace) == world.max_tokens


@pytest.mark.parametrize(
    ("slip", "trace"),
    [(0.0, "75214831$"), (1.0, "75204820$")],  # without the carries 4+8 is 12, and 1 is not carried either
)
def test_the_careless_teacher_drops_carries_and_goes_on_from_there(slip: float, trace: str) -> None:
    world = Add(slip=slip)
    assert world.demonstrate(task_of(world, SUM), np.random.default_rng(0)) == world.tokens(trace)


def test_each_carry_is_dropped_on_its_own() -> None:
    world = Add(slip=0.5)  # default_rng(0) draws .64 .27: the second carry is dropped
    assert world.demonstrate(task_of(world, SUM), np.random.default_rng(0)) == world.tokens("75214830$")


def test_the_teacher_is_right_as_often_as_the_docstring_says() -> None:
    rng = np.random.default_rng(0)
    for slip, share in [(0.75, 0.38), (1.0, 0.24)]:
        world = Add(slip=slip)
        tasks = [world.task("train", index) for index in range(4000)]
        right = [world.grade(task, world.demonstrate(task, rng))["success"] for task in tasks]
        assert np.mean(right) == pytest.approx(share, abs=0.025)


@pytest.mark.parametrize(
    ("answer", "success", "final", "steps", "ended"),
    [
        ("75214831$", 1, 1, 1.0, 1),
        ("75214831", 0, 0, 1.0, 0),  # no end
        ("75214831$$", 0, 0, 1.0, 0),
        ("75214831$1", 0, 0, 1.0, 0),
        ("75204821$", 0, 0, 0.5, 1),  # the carry dropped: 4+8 is 12 from there
        ("75214830$", 0, 0, 0.5, 1),
        ("57214831$", 0, 1, 0.5, 1),  # the right sum, a column the wrong way round
        ("75294831$", 0, 1, 0.0, 1),  # 9 is no carry
        ("132$", 0, 0, 0.0, 1),
        ("$", 0, 0, 0.0, 1),
        ("", 0, 0, 0.0, 0),
    ],
)
def test_grades(answer: str, success: float, final: float, steps: float, ended: float) -> None:
    signals = {"success": success, "final": final, "steps": steps, "ended": ended}
    for world, expected in ((Add(), signals), (Add(strict=False), {**signals, "success": final})):
        assert world.grade(task_of(world, SUM), world.tokens(answer)) == expected


def test_a_token_outside_the_alphabet_is_not_skipped() -> None:
    world = Add()
    answer = world.tokens("75214831$")
    assert world.grade(task_of(world, SUM), [*answer[:4], 999, *answer[4:]])["success"] == 0


def test_tasks_are_the_same_in_every_process() -> None:
    task = Add().task("train", 0)
    assert (task.data["problem"], task.id, task.level) == ("57+57=", 4093349147655404927, 2)
    assert Add().task("test", 7).data["problem"] == "27+40="


def test_train_and_test_never_meet_either_way_round() -> None:
    world = Add()

    def pairs(split: str) -> set[tuple[str, ...]]:
        problems = (world.task(split, index).data["problem"] for index in range(10_000))
        return {tuple(sorted(p[:-1].split("+"))) for p in problems}

    train, test = pairs("train"), pairs("test")
    assert not train & test
    assert len(test) > 400
    assert len(world.held_out(512)) == 512


def test_levels_bound_the_carries() -> None:
    world = Add(levels=(2, 2))
    assert {world.task("train", index).level for index in range(100)} == {2}
    assert {Add().task("train", index).level for index in range(100)} == {0, 1, 2}


@pytest.mark.parametrize(("fraction", "steps"), [(0.0, 0), (0.5, 1), (1.0, 2)])
def test_hints_are_whole_steps(fraction: float, steps: int) -> None:
    world = Add()
    hinted = world.hint(task_of(world, SUM), fraction)
    assert hinted.prompt == tuple(world.tokens(SUM + "75214831"[: 4 * steps]))
    assert world.gold(hinted) == world.tokens("75214831$"[4 * steps :])
    assert world.grade(hinted, world.gold(hinted))["success"] == 1


def test_the_teacher_goes_on_from_a_hint() -> None:
    world = Add(slip=1.0)
    hinted = world.hint(task_of(world, SUM), 0.5)
    assert world.demonstrate(hinted, np.random.default_rng(0)) == world.tokens("4830$")


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"digits": 3}, {"digits": 1}])
def test_self_test_passes(options: dict[str, Any]) -> None:
    Add(**options).self_test(30)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"digits": 0}, "add.digits must be from 1 to 8, not 0."),
        ({"slip": 2}, "add.slip must be from 0 to 1, not 2."),
        ({"levels": (1, 3)}, "add.levels is a range within 0 to 2, the digits, not 1 to 3."),
        ({"strict": "yes"}, "add.strict takes true or false, not 'yes'."),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError) as refusal:
        Add(**options)
    assert str(refusal.value) == sentence


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(PanoplyError, match=r"Unknown split 'tests'\. Did you mean 'test'\?"):
        Add().task("tests", 0)


def test_annotators_prefer_what_is_right_and_else_what_is_less_wrong() -> None:
    world = Add(sharpness=2.0)
    task = Task(1, tuple(world.tokens("47+85=")), 2, {"problem": "47+85="})
    right, half = world.tokens("75214831$"), world.tokens("75204821$")
    assert world.worth(task, right) == 1.0
    assert world.worth(task, half) == 0.25, "the first step drops a carry, the second goes on from there"
    assert world.preference(task, right, half) == pytest.approx(1 / (1 + np.exp(-1.5)))
    assert {"prefer", "preference"} <= world.access
