"""program:stack, a stack machine whose failures are told apart."""

from __future__ import annotations

import pytest

from panoply.worlds.text.characters import Draws
from panoply.worlds.text.program_stack import Stack, run

KIND = Stack()


@pytest.mark.parametrize(
    ("program", "left"),
    [("34+", [7]), ("34*5+", [17]), ("3d*", [9]), ("34s", [4, 3]), ("3+", None), ("d", None), ("3=", None)],
)  # fmt: skip
def test_what_words_do_to_the_stack(program: str, left: list[int] | None) -> None:
    assert run(program) == left


def test_the_expert_goes_from_digit_to_digit() -> None:
    assert KIND.solution("4071=") == "25*dd4*0+*7+*1+"
    assert run("25*dd4*0+*7+*1+") == [4071]


def test_failures_score_by_how_they_fail() -> None:
    programs = ["25*dd4*0+*7+*1+", "25*dd4*0+*7+*2+", "25*d4*0+*7+*1+", None, "925*dd4*0+*7+*1+", ""]
    found = KIND.grade(["4071="] * 6, programs)
    assert [signals["score"] for signals in found] == [1.0, -0.3, -0.6, -1.0, -0.3, -0.3]
    assert [signals["success"] for signals in found] == [1, 0, 0, 0, 0, 0]


def test_another_way_to_the_number_is_as_right() -> None:
    assert KIND.grade(["0081="], ["9d*"]) == [{"success": 1.0, "score": 1.0}]


def test_problems_are_four_digits() -> None:
    problems = {KIND.problem(Draws(str(i))) for i in range(200)}
    assert len(problems) > 190
    assert all(len(problem) == 5 and problem[:4].isdigit() for problem in problems)
