"""The kind `sql` of the world `program`: questions about people and departments, answered by queries that are run."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np

from panoply.rewards import tables
from panoply.sandbox.sql import Answer, Database
from panoply.worlds.text.characters import DIGITS, Draws
from panoply.worlds.text.program_kind import Kind

PEOPLE, DEPTS = {"n": "name", "a": "age", "c": "city", "p": "pay"}, {"f": "floor", "h": "head", "s": "size"}
COLUMNS = {**PEOPLE, **DEPTS}
ASKED = {"#": "COUNT", "+": "SUM", "^": "MAX", "_": "MIN", "": ""}
SIGNS = "<>="
WORDS = {
    **COLUMNS,
    **{digit: digit for digit in DIGITS},
    **{sign: f" {sign} " for sign in SIGNS},
    **{asked: f"{name}(" for asked, name in ASKED.items() if asked},
    "S": "SELECT ",
    ")": ")",
    ",": ", ",
    "F": " FROM people",
    "J": " JOIN depts ON dept = id",
    "W": " WHERE ",
    "&": " AND ",
    "B": " GROUP BY ",
}
"""What each token stands for in a query."""
QUESTION = re.compile(r"(?P<asked>[#+^_]?)(?P<column>[a-z])(/(?P<by>[a-z]))? (?P<conditions>\S+):")
BASES, PERSONS, DEPARTMENTS = 2, 40, 6
SHOWN = 5
"""Rows of a result that a verdict names."""


class Sql(Kind):
    walls = f"SQLite {sqlite3.sqlite_version} in this process, read-only, with an authorizer and a clock"
    alphabet = "".join(WORDS) + "/ :"
    longest = len("Sc,#n)FJWs>2&a<5Bc")
    asks = ":"
    slip, hard_slip = 0.7, 0.8

    def problem(self, draws: Draws) -> str:
        asked = list(ASKED)[draws.below(len(ASKED))]
        columns = list(COLUMNS) if draws.below(2) else list(PEOPLE)
        column = columns[draws.below(len(columns))]
        by = f"/{'cfs'[draws.below(3)]}" if asked and draws.below(3) == 0 else ""
        conditions = [
            "acpfs"[draws.below(5)] + SIGNS[draws.below(3)] + DIGITS[draws.below(10)]
            for _ in range(1 + draws.below(2))
        ]
        return f"{asked}{column}{by} {'&'.join(conditions)}:"

    def worth_asking(self, problem: str) -> bool:
        """Not where a result is empty or unknown or would be the same without its last condition; nor sums of names."""
        _, *conditions = re.split("[ &]", problem)
        if problem.startswith("+n") or len({c[0] for c in conditions}) < len(conditions):
            return False
        right, short = run(self.solution(problem)), run(_without_last(self.solution(problem)))
        told = all(one.rows and None not in one.rows[0] for one in right)
        return told and not any(tables.same(a.rows, b.rows) for a, b in zip(right, short, strict=True))

    def solution(self, problem: str) -> str:
        found = QUESTION.fullmatch(problem)
        assert found is not None
        asked, column, by, conditions = found["asked"], found["column"], found["by"], found["conditions"]
        what = f"{asked}{column}{')' if asked else ''}"
        selected = f"{by},{what}" if by else what
        tail = f"B{by}" if by else ""
        return f"S{selected}F{'J' if self._joins(problem) else ''}W{conditions}{tail}"

    def careless(self, problem: str, slip: float, hard: bool, rng: np.random.Generator) -> str:
        """Forgets the last condition; in the hard setting also takes a sign, or what is asked for, for another."""
        forgets, other_sign, other_asked = (rng.random(3) < slip).tolist()
        program = self.solution(problem)
        if hard and other_sign:
            at = max(program.rfind(sign) for sign in SIGNS)
            program = program[:at] + SIGNS[(SIGNS.index(program[at]) + 1) % 3] + program[at + 1 :]
        if hard and other_asked:
            program = "".join(TAKEN_FOR.get(word, word) for word in program)
        return _without_last(program) if forgets else program

    def grade(self, problems: Sequence[str], programs: Sequence[str | None]) -> list[dict[str, float]]:
        """`success`: the same result on both data bases. `table`: how alike results are, cell by cell. `ran`."""
        return [self._graded(problem, program) for problem, program in zip(problems, programs, strict=True)]

    def _graded(self, problem: str, program: str | None) -> dict[str, float]:
        found = [Answer(error="no end")] * BASES if program is None else run(program)
        if not all(one.ran for one in found):
            return {"success": 0.0, "table": 0.0, "ran": 0.0}
        both = [(a.rows, b.rows) for a, b in zip(found, run(self.solution(problem)), strict=True)]
        return {
            "success": min(tables.same(*pair) for pair in both),
            "table": sum(tables.graded(*pair) for pair in both) / BASES,
            "ran": 1.0,
        }

    def verdict(self, problem: str, program: str) -> str:
        """The query as SQLite reads it, and its rows on the first data base, or what is wrong with it."""
        answer = run(program)[0]
        rows = "; ".join(", ".join(map(str, row)) for row in answer.rows[:SHOWN])
        more = f" and {len(answer.rows) - SHOWN} more rows" if len(answer.rows) > SHOWN else ""
        return f"{sql(program)} → {answer.error or rows + more or 'no rows'}"

    def wrong(self, problem: str) -> list[str]:
        """The last condition forgotten, a list that does not end, and a query of something else."""
        right = self.solution(problem)
        return [_without_last(right), right + "&", "SnF"]

    def level(self, problem: str) -> int:
        return problem.count("&") + 1

    def part(self, problem: str) -> str:
        return "two tables" if self._joins(problem) else "one table"

    def _joins(self, problem: str) -> bool:
        return any(column in problem for column in DEPTS)


TAKEN_FOR = {"#": "+", "+": "#", "^": "_", "_": "^"}


def _without_last(program: str) -> str:
    """A query that lacks its last condition."""
    return re.sub(r"(W|&)[a-z][<>=][0-9](?=B|$)", "", program)


def sql(program: str) -> str:
    """A program as SQLite reads it."""
    return "".join(WORDS.get(word, "?") for word in program)


@lru_cache(maxsize=1 << 14)
def run(program: str) -> tuple[Answer, ...]:
    """What a program gives on each of the data bases, which never change."""
    return tuple(base(number).query(sql(program)) for number in range(BASES))


@cache
def base(number: int) -> Database:
    draws = Draws(f"program/sql/{number}", 1024)
    depts = [(i, draws.below(10), draws.below(PERSONS), draws.below(10)) for i in range(DEPARTMENTS)]
    people = [
        (i, draws.below(10), draws.below(5), draws.below(10), draws.below(DEPARTMENTS))
        for i in range(PERSONS)
    ]
    return Database(
        "CREATE TABLE people (name, age, city, pay, dept); CREATE TABLE depts (id, floor, head, size);"
        f"INSERT INTO people VALUES {', '.join(map(str, people))};"
        f"INSERT INTO depts VALUES {', '.join(map(str, depts))};"
    )
