"""Sums, rankings and open questions, against examples worked out by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.text.referee import Referee, _tau
from panoply.worlds.world import Task


def ranking(world: Referee, *texts: str) -> Task:
    """Of answers to `O2b=`."""
    return world._ranked(2, "b", texts)


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("bb", 1.0),
        ("b", 0.75),
        ("bbb", 0.75),
        ("abb", 0.75),
        ("ab", 0.5),
        ("bbbbbb", 0.0),
        ("x", 0.25),
        ("", 0.5),
    ],
)
def test_the_worth_of_an_answer(text: str, worth: float) -> None:
    world = Referee()
    task = world._task("open", "O2b=", n=2, letter="b", gold="bb")
    found = world.grade(task, world.tokens(text + "$"))
    assert found["worth"] == worth
    assert found["success"] == float(worth == 1)
    assert found["earned"] == 0, "who learns is not told"
    assert world.grade(task, world.tokens(text))["worth"] == 0, "it has no end"


@pytest.mark.parametrize(
    ("scores", "tau"),
    [
        ("86", 1.0),
        ("10", 1.0),
        ("68", -1.0),
        ("55", 0.0),
        ("8", -1.0),
        ("867", -1.0),
        ("8b", -1.0),
    ],
)
def test_a_ranking_earns_kendalls_tau(scores: str, tau: float) -> None:
    world = Referee()
    found = world.grade(ranking(world, "bb", "bbb"), world.tokens(scores + "$"))
    assert found["tau"] == found["earned"] == tau
    assert found["success"] == float(tau == 1)
    assert world.grade(ranking(world, "bb", "bbb"), world.tokens("86"))["tau"] == -1


def test_tau_by_hand() -> None:
    """Truth 3 > 2 = 2 > 1: five pairs differ. Of these 9 5 7 5 has four right and a tie."""
    assert _tau([3, 2, 2, 1], [9, 5, 7, 5]) == pytest.approx(4 / 5)
    assert _tau([3, 2, 2, 1], [1, 2, 2, 3]) == -1
    assert _tau([3, 2, 2, 1], [9, 9, 5, 1]) == pytest.approx(4 / 5)
    assert _tau([1, 2], None) == -1


def test_own_answers_become_a_question() -> None:
    """What could be taken for the next answer, or has no end, is shown as x."""
    world = Referee()
    task = world._task("open", "O2b=", n=2, letter="b", gold="bb")
    said = [world.tokens(text) for text in ("bb$", "b,b$", "bb", "bbbbbbbbb$", "$", "O2b=$")]
    asked = world.referee(task, said)
    assert asked is not None
    assert world.text(asked.prompt) == "R2b:bb,x,x,x,,x="
    assert asked.data["worth"][0] == 1
    assert world.scores(asked, world.tokens("900010$")) == [1.0, 0, 0, 0, 1 / 9, 0]
    assert world.scores(asked, world.tokens("90001$")) is None
    assert world.referee(world.task("train", 0), []) is None, "a sum can be checked"


def test_the_teacher_is_as_careless_as_the_docstring_says() -> None:
    world, rng = Referee(), np.random.default_rng(0)
    tasks = [world.task("train", index) for index in range(6000)]
    graded = {
        k: [world.grade(t, world.demonstrate(t, rng)) for t in tasks if world.part_of(t) == k]
        for k in world.kinds
    }
    assert np.mean([g["success"] for g in graded["sums"]]) == pytest.approx(0.4, abs=0.04)
    assert np.mean([g["success"] for g in graded["open"]]) == pytest.approx(0.3, abs=0.03)
    assert np.mean([g["tau"] for g in graded["rankings"]]) < 0.05, "longer is not better"
    by_length = ranking(world, "bbbb", "b", "bb")
    assert world.text(Referee(slip=1.0).demonstrate(by_length, rng)) == "412$"
    assert world.text(Referee(slip=0.0).demonstrate(by_length, rng)) == "468$"


def test_kinds_come_in_turn_and_splits_never_meet() -> None:
    world = Referee()
    tasks = [world.task("train", index) for index in range(1500)]
    assert Counter(world.part_of(task) for task in tasks) == dict.fromkeys(world.kinds, 500)
    assert not {t.id for t in tasks} & {world.task("test", index).id for index in range(1500)}
    assert {t.data["problem"] for t in world.held_out(300) if world.part_of(t) == "open"} == {
        f"O{n}{letter}="
        for n, letter in (("1", "d"), ("2", "c"), ("3", "b"), ("3", "f"), ("4", "a"), ("4", "e"))
    }
    assert all(len(set(t.data["worth"])) > 1 for t in tasks if world.part_of(t) == "rankings")
    assert {world.part_of(Referee(kinds=("sums",)).task("train", i)) for i in range(9)} == {"sums"}
    world.self_test(30)


def test_what_is_no_kind_is_refused() -> None:
    with pytest.raises(PanoplyError, match="Unknown kind of problem in referee 'opne'. Did you mean 'open'?"):
        Referee(kinds=("opne",))
    with pytest.raises(PanoplyError, match="names no kind"):
        Referee(kinds=())
