"""Worlds with several right answers, against examples worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.text.manyanswers import ManyAnswers
from panoply.worlds.world import Task

DEAL = "2358>10="  # 2+8, 8+2, 2*5, 5*2


def task_of(world: ManyAnswers, problem: str) -> Task:
    return Task(1, tuple(world.tokens(problem)), 0, {"problem": problem})


def countdown(**options: Any) -> ManyAnswers:
    return ManyAnswers(kind="countdown", **options)


# ------------------------------------------------------------------ right answers


def test_all_pairs_that_sum_to_the_number_are_right() -> None:
    world = ManyAnswers(low=3)
    answers = world.answers(task_of(world, "3="))
    assert answers == [world.tokens(a) for a in ("0+3$", "1+2$", "2+1$", "3+0$")]


def test_all_expressions_over_the_digits_that_reach_the_target_are_right() -> None:
    world = countdown()
    assert world.answers(task_of(world, DEAL)) == [world.tokens(a) for a in ("2*5$", "2+8$", "5*2$", "8+2$")]
    twice = countdown(operations=2)  # from left to right: (8-3)*2
    assert twice.tokens("8-3*2$") in twice.answers(task_of(twice, DEAL))


@pytest.mark.parametrize(
    ("world", "problem", "answer", "success", "formed", "ended"),
    [
        (ManyAnswers(), "37=", "12+25$", 1, 1, 1),
        (ManyAnswers(), "37=", "0+37$", 1, 1, 1),
        (ManyAnswers(), "37=", "12+26$", 0, 1, 1),
        (ManyAnswers(), "37=", "12+25", 0, 0, 0),  # no end
        (ManyAnswers(), "37=", "12+25$$", 0, 0, 0),
        (ManyAnswers(), "37=", "07+30$", 0, 0, 1),  # a leading zero would make one answer many
        (ManyAnswers(), "37=", "30+7+0$", 0, 0, 1),
        (ManyAnswers(), "37=", "37$", 0, 0, 1),
        (ManyAnswers(), "37=", "40-3$", 0, 0, 1),
        (ManyAnswers(), "37=", "+37$", 0, 0, 1),
        (ManyAnswers(), "37=", "$", 0, 0, 1),
        (countdown(), DEAL, "2*5$", 1, 1, 1),
        (countdown(), DEAL, "8+2$", 1, 1, 1),
        (countdown(), DEAL, "8-2$", 0, 1, 1),
        (countdown(), DEAL, "5+5$", 0, 0, 1),  # there is one 5
        (countdown(), "2558>10=", "5+5$", 1, 1, 1),
        (countdown(), DEAL, "9+1$", 0, 0, 1),  # not dealt
        (countdown(), DEAL, "8-3*2$", 0, 0, 1),  # one operation too many
        (countdown(operations=2), DEAL, "8-3*2$", 1, 1, 1),
        (countdown(operations=2), DEAL, "2*5$", 0, 0, 1),
        (countdown(), DEAL, "10$", 0, 0, 1),
        (countdown(), DEAL, "8+$", 0, 0, 1),
        (countdown(), DEAL, "", 0, 0, 0),
    ],
)
def test_grades(
    world: ManyAnswers, problem: str, answer: str, success: float, formed: float, ended: float
) -> None:
    found = world.grade(task_of(world, problem), world.tokens(answer))
    assert found == {"success": success, "formed": formed, "ended": ended}


def test_a_foreign_token_is_not_skipped() -> None:
    world = ManyAnswers()
    assert (
        world.grade(task_of(world, "37="), [*world.tokens("12+25"), 999, *world.tokens("$")])["success"] == 0
    )


def test_coverage_counts_different_right_answers() -> None:
    world = ManyAnswers()
    answers = [world.tokens(a) for a in ("12+25$", "12+25$", "25+12$", "12+26$", "0+37", "37+0$")]
    assert world.coverage(task_of(world, "37="), answers) == 3
    assert world.coverage(task_of(world, "37="), []) == 0


# ------------------------------------------------------------------ the teacher


def test_the_teacher_of_pairs_draws_low_numbers_and_goes_one_too_far() -> None:
    # default_rng(0) draws .637: x = ⌊38 · .406⌋ = 15, y = 22.
    world, task = ManyAnswers(slip=0.0), task_of(ManyAnswers(), "37=")
    assert world.demonstrate(task, np.random.default_rng(0)) == world.tokens("15+22$")
    spoilt = ManyAnswers(slip=1.0).demonstrate(task, np.random.default_rng(0))
    assert spoilt == world.tokens("15+23$")
    first = [int(world.text(world.demonstrate(task, rng)).split("+")[0]) for rng in _rngs(2000)]
    assert np.mean(np.array(first) < 9.5) == pytest.approx(0.5, abs=0.04)  # ¼ of the numbers, √¼ of the draws


def test_the_teacher_of_countdown_knows_the_digits_and_mistakes_the_sign() -> None:
    task = task_of(countdown(), DEAL)
    right = {world_text(countdown(slip=0.0), task, rng) for rng in _rngs(64)}
    assert right == {"2+8$", "2*5$", "5*2$", "8+2$"}
    wrong = {world_text(countdown(slip=1.0), task, rng) for rng in _rngs(256)}
    assert wrong == {"2-8$", "2+5$", "5+2$", "8-2$"}


def world_text(world: ManyAnswers, task: Task, rng: np.random.Generator) -> str:
    return world.text(world.demonstrate(task, rng))


def _rngs(n: int) -> list[np.random.Generator]:
    return [np.random.default_rng(i) for i in range(n)]


@pytest.mark.parametrize("kind", ["pairs", "countdown"])
def test_the_teacher_is_right_three_times_in_ten(kind: Any) -> None:
    world, rng = ManyAnswers(kind=kind), np.random.default_rng(0)
    tasks = [world.task("train", index) for index in range(4000)]
    grades = [world.grade(task, world.demonstrate(task, rng)) for task in tasks]
    assert np.mean([g["success"] for g in grades]) == pytest.approx(0.3, abs=0.025)
    assert all(g["formed"] for g in grades)


# ------------------------------------------------------------------ tasks


def test_tasks_are_the_same_in_every_process() -> None:
    assert ManyAnswers().task("train", 0).data["problem"] == "11="
    assert countdown().task("train", 0).data["problem"] == "2778>16="
    assert (ManyAnswers().task("test", 0).id, countdown().task("test", 0).id) == (
        6037978455064221092,
        1872900012772379149,
    )


def test_train_and_test_never_meet() -> None:
    world = ManyAnswers()
    train, test = ({world.task(s, i).data["problem"] for i in range(1000)} for s in ("train", "test"))
    assert test == {"12=", "19=", "26=", "33=", "40=", "47=", "54="}
    assert len(train) == 43
    assert not train & test
    world = countdown()
    dealt = [{world.task(s, i).data["problem"][:4] for i in range(1000)} for s in ("train", "test")]
    assert not dealt[0] & dealt[1]
    assert len(dealt[1]) > 30


def test_few_held_out_numbers_come_round_again() -> None:
    problems = [task.data["problem"] for task in ManyAnswers().held_out(9)]
    assert problems == ["12=", "19=", "26=", "33=", "40=", "47=", "54=", "12=", "19="]
    assert len({task.id for task in countdown().held_out(300)}) == 300


def test_every_target_can_be_reached() -> None:
    for operations in (1, 2, 3):
        world = countdown(operations=operations)
        for index in range(50):
            task = world.task("train", index)
            assert world.answers(task)
            assert all(world.grade(task, answer)["success"] for answer in world.answers(task))


def test_each_kind_has_its_own_warm_start_and_identities() -> None:
    assert (ManyAnswers().start, countdown().start) == ("manyanswers-start", "manyanswers-countdown-start")
    assert countdown().task("train", 0).id != countdown(operations=2).task("train", 0).id


# ------------------------------------------------------------------ the world checks itself


@pytest.mark.parametrize(
    "options", [{}, {"high": 99}, {"kind": "countdown"}, {"kind": "countdown", "operations": 3}]
)
def test_self_test_passes(options: dict[str, Any]) -> None:
    ManyAnswers(**options).self_test(30)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "pair"}, "manyanswers.kind takes pairs or countdown, not 'pair'."),
        ({"low": 0}, "manyanswers.low and high are a range within 1 to 999, not 0 to 59."),
        ({"low": 60}, "manyanswers.low and high are a range within 1 to 999, not 60 to 59."),
        ({"operations": 4}, "manyanswers.operations is between 1 and 3, not 4."),
        ({"slip": -1}, "manyanswers.slip must be from 0 to 1, not -1."),
    ],
)
def test_bad_options_are_refused_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError) as refusal:
        ManyAnswers(**options)
    assert str(refusal.value) == sentence


def test_a_range_without_numbers_to_hold_out_is_refused() -> None:
    with pytest.raises(PanoplyError, match="no problems to hold out"):
        ManyAnswers(low=13, high=14).held_out(1)
    with pytest.raises(PanoplyError, match="too few problems for a test split"):
        ManyAnswers(low=13, high=14).task("test", 0)
