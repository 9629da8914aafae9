"""The tool `python` of `tools`: programs by hand, what is shown of them, and that all of a round run at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import panoply as pp
from panoply.errors import PanoplyError
from panoply.sandbox import Result
from panoply.worlds.text import toolbox_python
from panoply.worlds.text.toolbox_python import Interpreter, shown
from panoply.worlds.text.tools import Tools

WORLD = Tools(kind="python")


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("(37+58)*64;", "6080"),
        ("37+58*64;", "3749"),
        ("((37+58)*64)%100;", "__80"),
        ("99*99*99;", "9702"),
        ("3-9;", "__-6"),
        ("(3-9)%100;", "__94"),
        (";", "____"),
        ("(1+2;", "__!S"),
        ("1%0;", "__!Z"),
        ("(3)(4);", "__!T"),
    ],
)
def test_what_is_shown_of_a_program(code: str, seen: str) -> None:
    assert Interpreter().call("", code) == seen


def test_a_program_that_was_ended_is_text_and_not_raised() -> None:
    assert shown(Result(-9, "time", "", 0.5, 0)) == "__!L"
    assert shown(Result(1, "", "MemoryError: memory limit exceeded\n", 0.1, 0)) == "__!X"
    assert shown(Result(0, "", "naïve\n", 0.1, 0)) == "__!X", "what a prompt has no token for"


@pytest.mark.parametrize("asked", ["1+1", "1;1;", ""])
def test_what_has_no_end_or_two_is_no_call(asked: str) -> None:
    assert Interpreter().call("", asked) is None


def test_questions_and_their_programs() -> None:
    """(8 − 25) · 7 = −119, and −119 modulo 100 is 81."""
    tool, question = Interpreter(), "08-25*07"
    assert tool.code(question) == "((8-25)*7)%100;"
    assert tool.answer(question) == "81"
    assert tool.call(question, tool.code(question)) == "__81"
    assert tool.careful(question, [(tool.code(question), "__81")]) == "A81"
    assert tool.careful(question, [("(8-25)*7)%100;", "__!S")]) == "C((8-25)*7)%100;", "an error is mended"
    assert (tool.needed(question), tool.needed("08+02+09")) == (1, 0)
    assert tool.careful("00+03+04", []) == "A07"


def test_the_teacher_slips_where_python_is_needed_and_never_at_sums() -> None:
    tool, dice = Interpreter(), np.random.default_rng(0)
    assert tool.hasty("08+02+09", [], dice) is None
    said = {str(tool.hasty("08-25*07", [], dice))[0] for _ in range(20)}
    assert said == {"A", "C"}, "a guess, or a program without a bracket"
    assert str(tool.hasty("08-25*07", [("(8", "__!S")], dice))[0] in "AC", "an error is no result"
    assert tool.hasty("08-25*07", [(tool.code("08-25*07"), "__81")], dice) is None


def test_the_world_holds() -> None:
    WORLD.self_test(16)
    dice = np.random.default_rng(0)
    tasks = [WORLD.task("test", i) for i in range(100)]
    assert len({task.id for task in WORLD.held_out(100)}) == 100
    taught: dict[bool, list[float]] = {True: [], False: []}
    for task in tasks:
        taught[task.level > 0].append(WORLD.grade(task, WORLD.demonstrate(task, dice))["success"])
    assert 0.1 < float(np.mean(taught[True])) < 0.5
    assert set(taught[False]) == {1.0}, "sums are known"


def test_programs_of_a_round_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of the sandbox for all plays of a round, and none for programs that were run before."""
    batches: list[int] = []
    monkeypatch.setattr(toolbox_python, "_remembered", lambda sandbox, held={}: held)
    found = toolbox_python.Wanted.find

    class Counted:
        def run_many(self, programs: Any) -> Any:
            batches.append(len(programs))
            return found(toolbox_python.Wanted()).run_many(programs)

    monkeypatch.setattr(toolbox_python.Wanted, "find", lambda self: Counted())
    tasks = [WORLD.task("train", i) for i in range(30) if WORLD.task("train", i).level][:4]
    turns = [WORLD.tokens(WORLD.tool.first_call(task.data["question"])) for task in tasks]
    WORLD.act_all([WORLD.play(task) for task in tasks], turns)
    monkeypatch.setattr(toolbox_python.Wanted, "find", found)
    assert batches == [4]


def test_what_came_of_a_call_is_told() -> None:
    said = {code: WORLD.verdict([], WORLD.tokens(code)) for code in ("C6*7;", "C(6;", "A42")}
    assert said["C6*7;"] == "printed 42"
    assert said["C(6;"].startswith("SyntaxError")
    assert said["A42"] == ""


def test_a_sandbox_is_named_or_has_no_effect() -> None:
    made = pp.plan("grpo", "tools:code", model="fresh")
    assert made.world().sandboxed is not None
    with pytest.raises(PanoplyError, match="tools.sandbox has no effect: lookup runs no code"):
        Tools(sandbox="monty")
