"""Programs on registers, against programs that are worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.text.registers import GAINS, REGISTERS, Registers, _lines, adds, mutual_information, run
from panoply.worlds.world import Task

WORLD = Registers()


def problem(text: str) -> Task:
    """`31>60` as a task."""
    at, held = text.index(">"), tuple(map(int, text.replace(">", "")))
    data = {"held": held, "register": "abcd"[at], "missing": 10 - held[at]}
    return Task(1, tuple(WORLD.tokens(text + "=")), 0, data)


def test_instructions() -> None:
    assert run((3, 1, 4, 0), "aC") == {"a": 4, "b": 1, "c": 7, "d": 0}
    assert run((3, 1, 4, 9), "xyDd") == {"a": 1, "b": 3, "c": 9, "d": 8}
    assert adds("xbx", "a") == 1
    assert adds("xbx", "b") == 0
    assert adds("x", "a") is None, "what it does depends on b"
    assert adds("xAAAx", "b") == 9


def test_eight_different_macros_of_three_to_five_instructions() -> None:
    for number in (*range(8), 52):  # of 52 two would be the same
        library = Registers(macros=number).library
        assert set(library) == {(register, gain) for register in REGISTERS for gain in GAINS}
        assert len(set(library.values())) == 8
        for (register, gain), text in library.items():
            assert 3 <= len(text) <= 5
            held = (7, 2, 5, 9)
            assert run(held, text)[register] == (held[REGISTERS.index(register)] + gain) % 10
    assert Registers(macros=1).library != WORLD.library


@pytest.mark.parametrize(
    ("answer", "success", "commented", "known", "ended"),
    [
        (".CBx.cDA$", 1, 0, 1, 1),
        ("#4.CBx#1.cDA$", 1, 1, 1, 1),
        ("#9.CBx.cDA$", 1, 0.5, 1, 1),  # what a comment says is nobody's business
        (".cC$", 1, 0, 0, 1),  # any program will do
        (".cccc$", 1, 0, 0, 1),
        (".CBx$", 0, 0, 1, 1),
        (".CBx.CBx$", 0, 0, 1, 1),
        ("CBx.cDA$", 0, 0, 0, 1),
        ("#4CBx.cDA$", 0, 0, 0, 1),
        ("#44.CBx.cDA$", 0, 0, 0, 1),
        (".CBx..cDA$", 0, 0, 0, 1),
        (".CBx.cDA#0$", 0, 0, 0, 1),
        (".CBx.cDA", 0, 0, 0, 0),
        ("$", 0, 0, 0, 1),
    ],
)
def test_grades(answer: str, success: float, commented: float, known: float, ended: float) -> None:
    found = WORLD.grade(problem("31>60"), WORLD.tokens(answer))
    assert found == {"success": success, "commented": commented, "known": known, "ended": ended}


def test_the_expert_adds_three_as_often_as_it_fits() -> None:
    assert WORLD.text(WORLD.gold(problem("31>60"))) == ".CBx.cDA$"
    assert WORLD.text(WORLD.gold(problem("314>2"))) == ".xccD.xccD.adCa.adCa$"
    assert [WORLD.text(line) for line in WORLD.lines(problem("31>60"))] == ["CBx", "cDA$"]
    assert WORLD.task("train", 0).level == len(WORLD.lines(WORLD.task("train", 0)))
    longest = max(
        len(Registers(comments=1.0).demonstrate(WORLD.task("train", i), rng_of(0))) for i in range(200)
    )
    assert 25 < longest <= WORLD.max_tokens


def rng_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_teacher_slips_on_lines_without_a_comment_alone() -> None:
    rng, other = rng_of(0), {3: 1, 1: 3}
    bare = slipped = lines = 0
    for i in range(600):
        task = WORLD.task("train", i)
        missing, register = task.data["missing"], task.data["register"]
        for comment, text in _lines(WORLD.text(WORLD.demonstrate(task, rng))):
            gain = 3 if missing >= 3 else 1
            lines += 1
            if comment:
                assert (comment, text) == (str(missing), WORLD.library[register, gain])
            else:
                bare += 1
                slipped += text == WORLD.library[register, other[gain]]
            missing -= gain  # as if it had not slipped
        assert missing == 0
    assert bare / lines == pytest.approx(0.6, abs=0.05)
    assert slipped / bare == pytest.approx(0.8, abs=0.05)


def test_a_mark_is_a_point_or_a_comment_and_a_point() -> None:
    task = WORLD.before_line(problem("31>60"), WORLD.tokens("#4.CBx"))
    assert WORLD.text(task.prompt) == "31>60=#4.CBx"
    told = {
        said: WORLD.text(WORLD.allowed(task, WORLD.tokens(said)) or [])
        for said in ("", "#", "#3", "#3.", ".")
    }
    assert told == {"": "#.", "#": "0123456789", "#3": ".", "#3.": "$", ".": "$"}
    assert WORLD.allowed(problem("31>60"), []) is None
    grades = {said: WORLD.grade(task, WORLD.tokens(said)) for said in (".$", "#3.$", "#3$", "cC$")}
    assert [g["success"] for g in grades.values()] == [1, 1, 0, 0]
    assert [g["commented"] for g in grades.values()] == [0, 1, 0, 0]


def test_mutual_information() -> None:
    assert mutual_information([("1", "x"), ("2", "y")] * 3) == pytest.approx(math.log(2))
    assert mutual_information([("1", "x"), ("1", "y"), ("2", "x"), ("2", "y")]) == pytest.approx(0.0)
    assert mutual_information([("", "x"), ("", "y")]) == 0.0


def test_splits_never_meet() -> None:
    train, test = ({WORLD.task(split, i).id for i in range(800)} for split in ("train", "test"))
    assert not train & test
    assert len(WORLD.held_out(256)) == 256
    WORLD.self_test(16)
    with pytest.raises(PanoplyError, match="from 0 to 1"):
        Registers(slip=2.0)
