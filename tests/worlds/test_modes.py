"""Three ways to answer, against examples worked out by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from panoply.errors import PanoplyError
from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.worlds.text.modes import Modes
from panoply.worlds.world import Task


def task_of(world: Modes, problem: str) -> Task:
    return Task(1, tuple(world.tokens(problem + "=")), len(problem) // 2, {"problem": problem})


@pytest.mark.parametrize(
    ("answer", "success", "thought", "missed", "overused", "malformed", "ended"),
    [
        ("N4$", 1, 0, 1, 0, 0, 1),
        ("T+47*24$", 1, 1, 0, 0, 0, 1),
        ("G74$", 1, 1, 0, 0, 0, 1),
        ("N5$", 0, 0, 1, 0, 0, 1),
        ("T+47*25$", 0, 1, 0, 0, 0, 1),
        ("G74", 0, 1, 0, 0, 1, 0),
        ("G744$", 0, 1, 0, 0, 1, 1),
        ("N74$", 0, 0, 1, 0, 1, 1),
        ("4$", 0, 0, 0, 0, 1, 1),
        ("$", 0, 0, 0, 0, 1, 1),
        ("", 0, 0, 0, 0, 1, 0),
    ],
)
def test_grades(
    answer: str, success: int, thought: int, missed: int, overused: int, malformed: int, ended: int
) -> None:
    world = Modes()
    found = world.grade(task_of(world, "3+4*2"), world.tokens(answer))
    assert list(found.values()) == [success, thought, missed, overused, malformed, ended]


def test_labels_go_by_the_steps() -> None:
    world = Modes()
    easy = task_of(world, "3*9")
    assert world.grade(easy, world.tokens("N7$"))["missed"] == 0
    assert world.grade(easy, world.tokens("T*97$"))["overused"] == 1
    assert Modes(easy=0).grade(easy, world.tokens("N7$"))["missed"] == 1
    assert (world.part_of(easy), world.part_of(task_of(world, "3*9+1"))) == ("1 step", "2 steps")


def test_the_reference_thinks_where_there_is_room() -> None:
    world = Modes()
    assert world.text(world.gold(task_of(world, "1+1+1+1+1+1"))) == "G23456$"
    assert world.text(world.gold(task_of(world, "1+1*3+1+1"))) == "T+12*36+17+18$"
    assert len(world.gold(task_of(world, "1+1*3+1+1"))) == world.room
    begun = world.in_mode(task_of(world, "3+4*2"), "G")
    assert world.text(begun.prompt) == "3+4*2=G"
    assert world.text(world.gold(begun)) == "74$"
    assert world.grade(begun, world.tokens("74$"))["success"] == 1
    assert world.mode(begun, world.tokens("74$")) == "G"
    assert world.text(world.demonstrate(begun, np.random.default_rng(0)))[-1] == "$"


def test_the_teacher_has_habits_and_slips() -> None:
    world, rng = Modes(), np.random.default_rng(0)
    task = task_of(world, "3*4*3")
    said = Counter(world.text(world.demonstrate(task, rng)) for _ in range(4000))
    letters = Counter()
    for text, times in said.items():
        letters[text[0]] += times
    assert [letters[m] / 4000 for m in "NTG"] == pytest.approx([0.5, 0.25, 0.25], abs=0.03)
    assert said["T*42*36$"] / letters["T"] == pytest.approx(0.64, abs=0.05)
    assert said["T*47*30$"] / letters["T"] == pytest.approx(0.04, abs=0.02), "both done as sums: 3+4 and 7+3"
    assert said["G26$"] / letters["G"] == pytest.approx(0.36, abs=0.05)
    long = task_of(world, "1+1+1+1+1+1")
    assert max(len(world.demonstrate(long, rng)) for _ in range(200)) == world.room, (
        "cut where there is no room"
    )


def test_splits_never_meet_and_lengths_are_alike() -> None:
    world = Modes()
    train, test = ([world.task(split, i) for i in range(3000)] for split in ("train", "test"))
    assert not {t.id for t in train} & {t.id for t in test}
    assert len(world.held_out(256)) == 256
    drawn = Counter(t.level for t in train)
    assert [drawn[n] / 3000 for n in range(1, 7)] == pytest.approx([1 / 6] * 6, abs=0.03)
    world.self_test(32)


def test_how_likely_a_policy_thinks_is_what_it_does() -> None:
    world = Modes()
    policy = open_policy("start", world, 0, "cpu")
    assert [world.measure(f"thinks@{n}", policy) for n in (1, 4)] == pytest.approx([0.5, 0.5], abs=0.03)
    with torch.no_grad():
        found = Collector(world, policy, 0, split="test").episodes(world.held_out(64), 2)
    assert float(found.by("episode").sum(found["signal:success"]).mean()) == pytest.approx(0.33, abs=0.1)


def test_options_that_do_not_fit_are_refused() -> None:
    for options, why in (
        ({"operations": (5, 3)}, "fewest first, not 5 to 3"),
        ({"room": 7}, "needs 8 tokens at the least"),
        ({"habit": (0.5, 0.5)}, "1 in all"),
        ({"habit": (0.5, 0.4, 0.0)}, "1 in all"),
        ({"slips": (0.5,)}, "not 1"),
    ):
        with pytest.raises(PanoplyError, match=why):
            Modes(**options)  # type: ignore[arg-type]
