"""Queries that nobody has read, on data in memory: they may read these tables and nothing else, for a while.

    base = Database("CREATE TABLE t (x); INSERT INTO t VALUES (1), (2);")
    base.query("SELECT x FROM t WHERE x > 1")    # Answer(rows=((2,),), error='')

It runs in this process, since there is nothing to get hold of: SQLite asks an authorizer of ours about every table,
column and function of a statement before the first step of it, and what is not on a list of what may be is refused.
What a query may use up is bounded by steps of SQLite's machine, so that the same query ends in the same way on every
computer; by the clock, should single steps be slow; and in the number and the size of what it gives.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_NUMBERS = "abs avg count max min round sign sum total"
_TEXT = "group_concat instr length like lower ltrim replace rtrim substr substring trim unicode upper"
_OTHERS = "coalesce iif ifnull nullif typeof date datetime julianday strftime time"
FUNCTIONS = frozenset(f"{_NUMBERS} {_TEXT} {_OTHERS}".split(" "))
"""What a query may call. None of them has a side effect, reads a file, draws by chance or makes much of little."""
STEPS = 1000
"""Of SQLite's machine between two looks at what a query has used up."""


@dataclass(frozen=True)
class Limits:
    """What one query may use."""

    steps: int = 2_000_000
    """Of SQLite's machine: about a tenth of a second."""
    seconds: float = 0.5
    """By the clock, where steps are slow."""
    rows: int = 1000
    """That it may give. One that gives more is ended."""
    bytes: int = 10_000
    """Of the largest value, and of the query itself."""


@dataclass(frozen=True)
class Answer:
    """What a query gave: rows, or why there are none."""

    rows: tuple[tuple[Any, ...], ...] = ()
    error: str = ""

    @property
    def ran(self) -> bool:
        return not self.error


class Database:
    """Tables in memory that a script of ours has made, and that nobody can change afterwards."""

    def __init__(self, script: str, limits: Limits | None = None):
        self.limits = limits or Limits()
        self._base = sqlite3.connect(":memory:", check_same_thread=False, cached_statements=0)
        self._base.executescript(script)
        self._base.execute("PRAGMA query_only = ON")
        self._base.execute("PRAGMA temp_store = MEMORY")
        names = self._base.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self._tables: Collection[str] = frozenset(name for (name,) in names)
        for category, most in (
            (sqlite3.SQLITE_LIMIT_LENGTH, self.limits.bytes),
            (sqlite3.SQLITE_LIMIT_SQL_LENGTH, self.limits.bytes),
            (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
            (sqlite3.SQLITE_LIMIT_COLUMN, 50),
            (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 100),
            (sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 20),
            (sqlite3.SQLITE_LIMIT_VDBE_OP, 25_000),
            (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100),
            (sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 1),
        ):
            self._base.setlimit(category, most)
        self._base.set_authorizer(self._authorize)

    def query(self, text: str) -> Answer:
        """The rows of one SELECT. Whatever is wrong with it is said and never raised."""
        if "\0" in text:
            return Answer(error="a query has no characters of number 0")
        left, until = self.limits.steps // STEPS, time.monotonic() + self.limits.seconds

        def over() -> bool:
            nonlocal left
            left -= 1
            return left < 0 or time.monotonic() > until

        self._base.set_progress_handler(over, STEPS)
        cursor = self._base.cursor()
        try:
            rows = cursor.execute(text).fetchmany(self.limits.rows + 1)
        except (sqlite3.Error, sqlite3.Warning, UnicodeError, OverflowError, MemoryError) as error:
            return Answer(error=str(error)[:200] or type(error).__name__)
        finally:
            cursor.close()
            self._base.set_progress_handler(None, 0)
        if len(rows) > self.limits.rows:
            return Answer(error=f"more than {self.limits.rows} rows")
        return Answer(tuple(rows)) if cursor.description else Answer(error="nothing that gives rows")

    def close(self) -> None:
        self._base.close()

    def _authorize(
        self, action: int, first: str | None, second: str | None, base: str | None, inner: str | None
    ) -> int:
        """Whether a statement may be: a SELECT that reads these tables and calls these functions."""
        allowed = (
            action == sqlite3.SQLITE_SELECT
            or (action == sqlite3.SQLITE_READ and first in self._tables)
            or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FUNCTIONS)
        )
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY
