"""Programs that are run, against results that are worked out by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.rewards import tables
from panoply.sandbox import Program as Source
from panoply.sandbox import Result, Wanted
from panoply.worlds.text import program_python, program_sql
from panoply.worlds.text.program import KINDS, Program
from panoply.worlds.text.program_kind import Kind
from panoply.worlds.world import OneTurn, Task

SQL, PYTHON = Program(kind="sql"), Program(kind="python")


def asked(world: Program, problem: str) -> Task:
    return Task(1, tuple(world.tokens(world.does.prompt(problem))), 0, {"problem": problem})


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_sound(kind: str) -> None:
    """References succeed and mistakes do not, all fit, and every draw is a problem of one split."""
    world = Program(kind=kind)  # type: ignore[arg-type]
    world.self_test(8)
    tasks = [world.task(split, i) for split in ("train", "test") for i in range(40)]
    assert {t.id for t in tasks[:40]}.isdisjoint(t.id for t in tasks[40:])
    assert max(len(world.gold(task)) for task in tasks) <= world.max_tokens
    assert len(world.held_out(100)) == 100
    names = {frozenset(world.grade(task, world.gold(task))) | {"ended"} for task in tasks[:3]}
    assert names == {frozenset(world.grade(tasks[0], []))}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hard", [False, True])
def test_the_teacher_slips_as_often_as_it_is_told(kind: str, hard: bool) -> None:
    """Never, and then it is right; or always, and then it is wrong."""
    for slip, success in ((0.0, 1.0), (1.0, 0.0)):
        world = Program(kind=kind, hard=hard, slip=slip)  # type: ignore[arg-type]
        tasks = [world.task("train", i) for i in range(12)]
        said = [world.demonstrate(task, np.random.default_rng(0)) for task in tasks]
        assert {graded["success"] for graded in world.grade_all(tasks, said)} == {success}


def test_a_kind_without_grammar_is_not_asked_before_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    task = SQL.task("train", 0)
    assert not OneTurn(SQL, task).restricts
    monkeypatch.setattr(program_sql.Sql, "allowed", lambda self, problem, said: "S$")
    assert OneTurn(SQL, task).restricts
    assert SQL.allowed(task, []) == SQL.tokens("S$")
    assert Kind.allowed is not program_sql.Sql.allowed


def test_words_of_sql() -> None:
    assert program_sql.sql("Sc,#n)FJWs>2Bc") == (
        "SELECT city, COUNT(name) FROM people JOIN depts ON dept = id WHERE size > 2 GROUP BY city"
    )
    assert SQL.does.solution("#n/c s>2:") == "Sc,#n)FJWs>2Bc"
    assert SQL.does.solution("p a<5&c=1:") == "SpFWa<5&c=1"


def test_what_a_query_is_worth() -> None:
    """Written otherwise it is as right; what does not run is worth nothing; what nearly does is worth a part."""
    task = asked(SQL, "#n a<5&c=1:")
    for text, success, ran in (
        ("S#n)FWa<5&c=1$", 1, 1),
        ("S#n)FWc=1&a<5$", 1, 1),
        ("S#n)FJWc=1&a<5$", 1, 1),
        ("S#n)FWa<5$", 0, 1),
        ("S#n)FWa<5&c=1", 0, 0),
        ("S#nFWa<5&c=1$", 0, 0),
        ("S#s)FWa<5&c=1$", 0, 0),
        ("$", 0, 0),
    ):
        graded = SQL.grade(task, SQL.tokens(text))
        assert (graded["success"], graded["ran"]) == (success, ran), text
        assert graded["table"] == 0 if not ran else 0 < graded["table"] <= 1, text
    assert SQL.grade(task, SQL.tokens("S#n)FWa<5&c=1$"))["table"] == 1


def test_luck_on_one_data_base_is_not_enough() -> None:
    """A condition that holds for as many people on the first data base only."""
    first, second = [
        {program: program_sql.base(i).query(program_sql.sql(program)).rows for program in SOME}
        for i in range(2)
    ]
    lucky = next((a, b) for a in SOME for b in SOME if first[a] == first[b] and second[a] != second[b])
    assert [tables.same(*(rows[p] for p in lucky)) for rows in (first, second)] == [1, 0]
    problem = f"#n {lucky[0].partition('W')[2]}:"
    assert SQL.does.solution(problem) == lucky[0]
    assert SQL.grade(asked(SQL, problem), SQL.tokens(lucky[1] + "$"))["success"] == 0


SOME = [f"S#n)FW{column}{sign}{digit}" for column in "acp" for sign in "<>=" for digit in range(10)]


def test_no_question_is_answered_by_nothing_or_without_its_condition() -> None:
    for task in (SQL.task("train", i) for i in range(30)):
        whole = SQL.does.solution(task.data["problem"])
        short = program_sql.run(program_sql._without_last(whole))
        for right, other in zip(program_sql.run(whole), short, strict=True):
            assert right.rows
            assert None not in right.rows[0]
            assert Counter(right.rows) != Counter(other.rows)


def test_how_alike_tables_are() -> None:
    """Worked out by hand: of the values 1, 2 and 9 two are wanted, of four wanted two are there, two rows of three."""
    found, wanted = [(1, 2), (1, 9)], [(1, 2), (3, 4)]
    assert tables.precision(found, wanted) == 2 / 3
    assert tables.recall(found, wanted) == 2 / 4
    assert tables.cardinality(found, [*wanted, (5, 6)]) == 2 / 3
    assert tables.graded(found, wanted) == pytest.approx((2 / 3 + 2 / 4 + 1) / 3)
    assert tables.same(found, list(reversed(found))) == 1, "nobody asked for an order"
    assert tables.same([(1,), (1,)], [(1,)]) == 0, "how often a row comes counts"
    everything = [(i,) for i in range(10)]
    assert tables.recall(everything, [(3,)]) == 1
    assert tables.graded(everything, [(3,)]) == pytest.approx((0.1 + 1 + 0.1) / 3)
    assert tables.graded([], []) == 1
    assert tables.graded([], wanted) == tables.graded(wanted, []) == 0


def test_what_a_program_of_python_is_worth() -> None:
    """Every list by hand: the sum of all but the smallest number, and what other ways of writing are worth."""
    task = asked(PYTHON, "sdr+>")
    assert program_python._wanted("sdr+>") == [sum(x) - min(x) for x in program_python.LISTS]
    for text, success, passed, ran in (
        ("sum(sorted(x)[1:][::-1])$", 1, 1, 1),
        ("sum(sorted(x)[1:])$", 1, 1, 1),
        ("sum(x)-min(x)$", 1, 1, 1),
        ("sum(x)$", 0, 0.25, 1),  # the second list has a 0 in it
        ("x[0]$", 0, 0, 1),
        ("sum(x))$", 0, 0, 0),
        ("sum(x$", 0, 0, 0),
        ("sum(sorted(x)[1:][::-1])", 0, 0, 0),
        ("$", 0, 0, 0),
    ):
        graded = PYTHON.grade(task, PYTHON.tokens(text))
        assert (graded["success"], graded["passed"], graded["ran"]) == (success, passed, ran), text


def test_what_came_of_a_program_is_said_in_words() -> None:
    """For those who look: what it does, or what is wrong with it. A hint stands in the prompt and belongs to it."""
    long = Program(kind="python", sandbox="monty")
    program_python._remembered("monty")["max(x)"] = Result(-9, "time", "7", 0.5, 0)
    for world, prompt, answer, said in (
        (PYTHON, "sdr+>", "sum(x)$", "printed 71 85 88 79"),
        (PYTHON, "sdr+>su", "m(x)$", "printed 71 85 88 79"),
        (PYTHON, "sdr+>", "$", "there is no program"),
        (PYTHON, "sdr+>", "sum(x)", "it has no end, or more than one"),
        (long, "sdr+>", "max(x)$", "it took too long"),
        (SQL, "#n a>8:", "S#n)FWa>8$", "SELECT COUNT(name) FROM people WHERE age > 8 → 4"),
        (Program(kind="stack"), "0042=", "42$", "leaves 4 2"),
        (Program(kind="stack"), "0042=", "4+$", "a word finds too few numbers"),
        (Program(kind="ir"), "+ab>", "a$", "computes "),
        (Program(kind="shell"), "Gcfo2>", "ivPFE$", "grep -i -v o c f → exit "),
    ):
        found = world.verdict(world.tokens(prompt), world.tokens(answer))
        assert found.startswith(said), (prompt, answer)
    broken = PYTHON.verdict(PYTHON.tokens("sdr+>"), PYTHON.tokens("sum($"))
    assert "Error" in broken
    del program_python._remembered("monty")["max(x)"]
    assert SQL.verdict(SQL.tokens("n a>8:"), SQL.tokens("SnFWa$")).count(";") == program_sql.SHOWN - 1


def test_nothing_that_is_expected_goes_into_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a reference nor a number that is wanted; equal programs, and those seen before, go in once."""
    went: list[str] = []

    class Box:
        def run_many(self, programs: list[Source]) -> list[Result]:
            went.extend(program.code for program in programs)
            return [Result(0, "", "999\n" * 4, 0.0, 0) for _ in programs]

    monkeypatch.setattr(Wanted, "find", lambda self: Box())
    program_python._remembered.cache_clear()
    world, task = Program(kind="python", sandbox="monty"), asked(PYTHON, "sdr+>")
    said = [world.tokens(text) for text in ("max(x)$", "min(x)$", "max(x)$")]
    for _ in range(2):
        assert [g["success"] for g in world.grade_all([task] * 3, said)] == [0, 0, 0]
    assert sorted(went) == [program_python.FRAME.format(text) for text in ("max(x)", "min(x)")]
    assert not any(
        "sorted" in code or str(n) in code for code in went for n in program_python._wanted("sdr+>") or []
    )
    program_python._remembered.cache_clear()


@pytest.mark.parametrize(
    ("result", "ran"),
    [
        (Result(1, "", "23\nValueError: x\n", 0.0, 0), 0),
        (Result(-9, "time", "", 0.5, 0), 0),
        (Result(-9, "lost", "", 0.5, 0), 0),
        (Result(0, "", "62\n85\n87\n77\n1\n", 0.0, 0), 1),
        (Result(0, "", "62\n85\n87\n", 0.0, 0), 1),
    ],
)
def test_a_program_that_fails_or_says_too_much_or_too_little(result: Result, ran: int) -> None:
    graded = program_python._graded([62, 85, 87, 77], program_python._lines(result))
    assert (graded["success"], graded["ran"]) == (0, ran)


def test_a_sandbox_is_for_kinds_that_run_code() -> None:
    assert SQL.sandboxed is None
    assert PYTHON.sandboxed == Wanted("auto")
    assert Program(kind="python", sandbox="monty").sandboxed == Wanted("monty")
    with pytest.raises(PanoplyError, match="program.sandbox has no effect: sql runs no code of others"):
        Program(sandbox="monty")


def test_bad_settings() -> None:
    with pytest.raises(PanoplyError, match="program.slip"):
        Program(slip=2.0)
    with pytest.raises(PanoplyError, match="kind"):
        Program(kind="cobol")  # type: ignore[arg-type]
