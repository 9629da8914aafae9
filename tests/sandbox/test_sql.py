"""Queries that would do harm, or never end, on a data base that must be the same after each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from panoply.sandbox.sql import Database, Limits

SCRIPT = "CREATE TABLE t (x, y);" + "".join(f"INSERT INTO t VALUES ({i}, {i % 7});" for i in range(40))
BASE = Database(SCRIPT)
LARGE = f"replace('{'x' * 90}', 'x', '{'y' * 100}')"


def test_a_query_gives_its_rows() -> None:
    assert BASE.query("SELECT x, y FROM t WHERE x > 37 ORDER BY x DESC").rows == ((39, 4), (38, 3))
    assert BASE.query("SELECT max(x) FROM t WHERE x < 0").rows == ((None,),)
    empty = BASE.query("SELECT x FROM t WHERE x > 99")
    assert empty.ran
    assert empty.rows == ()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("DROP TABLE t", "not authorized"),
        ("INSERT INTO t VALUES (1, 2)", "not authorized"),
        ("UPDATE t SET x = 0", "not authorized"),
        ("DELETE FROM t", "not authorized"),
        ("CREATE TEMP TABLE s (x)", "not authorized"),
        ("ATTACH '{file}' AS other", "not authorized"),
        ("VACUUM INTO '{file}'", "authorization denied"),
        ("PRAGMA writable_schema = ON", "not authorized"),
        ("PRAGMA query_only = OFF", "not authorized"),
        ("SELECT * FROM pragma_database_list", "not authorized"),
        ("BEGIN", "not authorized"),
        ("SELECT load_extension('{file}')", "not authorized to use function"),
        ("SELECT readfile('/etc/passwd')", "no such function"),
        ("SELECT fts3_tokenizer('simple')", "not authorized to use function"),
        ("SELECT random()", "not authorized to use function"),
        ("SELECT sql FROM sqlite_master", "prohibited"),
        ("WITH RECURSIVE c (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c) SELECT i FROM c", "not authorized"),
        ("SELECT zeroblob(2000000000)", "not authorized to use function"),
        (f"SELECT replace({LARGE}, 'y', 'zz')", "too big"),
        ("SELECT x FROM t; DROP TABLE t", "one statement"),
        ("SELECT a.x FROM t a, t b", "more than 1000 rows"),
        ("SELECT missing FROM t", "no such column"),
        ("SELECT '\ud800'", "surrogates"),
        ("SELECT\0 1", "characters of number 0"),
        ("", "nothing that gives rows"),
        (f"SELECT {'(' * 200}1{')' * 200}", "overflow|too large"),
        (f"SELECT {'1' * 20_000}", "too (big|large)"),
    ],
)  # fmt: skip
def test_what_is_refused(query: str, said: str, tmp_path: Path) -> None:
    """In words, and without a trace: no file, and the same forty rows."""
    answer = BASE.query(query.replace("{file}", str(tmp_path / "file")))
    assert not answer.ran
    assert answer.rows == ()
    assert re.search(said, answer.error.lower()), answer.error
    assert list(tmp_path.iterdir()) == []
    assert BASE.query("SELECT count(*), sum(x) FROM t").rows == ((40, 780),)


def test_a_query_that_would_never_end() -> None:
    """Is ended after so many steps of SQLite's machine, the same everywhere; and by the clock, where steps are slow."""
    six_fold = f"SELECT count(*) FROM {', '.join(f't t{i}' for i in range(6))}"
    assert BASE.query(six_fold).error == "interrupted"
    assert Database(SCRIPT, Limits(steps=10**12, seconds=0.05)).query(six_fold).error == "interrupted"
    three_fold = "SELECT count(*) FROM t a, t b, t c"
    assert BASE.query(three_fold).rows == ((64_000,),)
    assert Database(SCRIPT, Limits(steps=50_000)).query(three_fold).error == "interrupted"
    assert BASE.query("SELECT 1").rows == ((1,),), "what one query used up is nothing to the next"
