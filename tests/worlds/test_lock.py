"""The combination lock, against examples worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.evaluation.held_out import evaluate
from panoply.policies.build import open_policy, warm_start
from panoply.worlds.text.lock import Lock
from panoply.worlds.world import Task

PROBLEM = "53028714="


def task_of(world: Lock, problem: str = PROBLEM) -> Task:
    return Task(1, tuple(world.tokens(problem)), world.places, {"problem": problem})


def test_letters_are_small_for_odd_digits_and_large_for_even_ones() -> None:
    world = Lock()
    assert world.text(world.gold(task_of(world))) == "fdACIhbE$"
    short = Lock(places=2)
    assert short.text(short.gold(task_of(short, "90="))) == "jA$"
    world.self_test(16)


@pytest.mark.parametrize(
    ("answer", "success", "places", "ended"),
    [
        ("fdACIhbE$", 1, 1, 1),
        ("fdACIhbe$", 0, 7 / 8, 1),
        ("FDACIhbE$", 0, 6 / 8, 1),
        ("fdACIhbE", 0, 1, 0),
        ("fdACIhbEE$", 0, 1, 1),
        ("fdACIhb$", 0, 7 / 8, 1),
        ("$", 0, 0, 1),
        ("", 0, 0, 0),
    ],
)
def test_one_wrong_place_and_it_stays_shut(answer: str, success: float, places: float, ended: float) -> None:
    world = Lock()
    found = world.grade(task_of(world), world.tokens(answer))
    assert found == {"success": success, "places": pytest.approx(places), "ended": ended}


def test_the_careless_teacher_tosses_coins_and_the_labeller_is_mostly_right() -> None:
    world, rng = Lock(), np.random.default_rng(0)
    task = task_of(world)
    careless = [world.grade(task, world.demonstrate(task, rng)) for _ in range(3000)]
    assert np.mean([g["places"] for g in careless]) == pytest.approx(0.5, abs=0.02)
    assert np.mean([g["success"] for g in careless]) < 0.015
    labelled = [world.grade(task, world.teach(task, "labeller", rng)) for _ in range(3000)]
    assert np.mean([g["success"] for g in labelled]) == pytest.approx(0.8, abs=0.03)
    assert {g["places"] for g in labelled} == {7 / 8, 1.0}
    assert world.teach(task, "reference", rng) == world.gold(task)
    hinted = world.hint(task, 0.5)
    assert len(hinted.given) + len(world.teach(hinted, "labeller", rng)) == 9


def test_splits_do_not_meet_and_options_are_checked() -> None:
    world = Lock()
    train, test = ({world.task(s, i).data["problem"] for i in range(400)} for s in ("train", "test"))
    assert not train & test
    assert len({task.id for task in world.held_out(128)}) == 128
    with pytest.raises(PanoplyError, match=r"lock.right must be from 0 to 1, not 1.5."):
        Lock(right=1.5)


def test_the_start_is_weak_but_knows_the_letters() -> None:
    world = Lock()
    folder, policy = warm_start(world), open_policy("start", world, 0, "cpu")
    assert folder is not None
    assert sum(file.stat().st_size for file in folder.iterdir()) < 600_000
    assert evaluate(world, policy, 128).sampled < 0.05
