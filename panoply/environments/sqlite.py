"""Questions about a SQLite file of yours: queries in turns, which may read and nothing else, and then the answer."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from panoply.environments.environment import NoSuch, known
from panoply.sandbox.sql import Database

ROWS = 20
"""Of a result that are shown."""


def make(id: str, options: Mapping[str, Any]) -> Session:
    for name in options:
        known("option of sqlite", name, ["questions"])
    file, questions = Path(id), Path(str(options.get("questions", "")))
    if not file.is_file():
        raise NoSuch(f"There is no SQLite file '{id}'.")
    if "questions" not in options or not questions.is_file():
        raise NoSuch(
            f"Questions about {file.name} are lines of JSON with a question, its answer and, for the expert, sql: "
            f"sqlite:{id},questions=FILE.jsonl."
        )
    try:
        with sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True) as base:
            script = "\n".join(base.iterdump())
            tables = [text for (text,) in base.execute("SELECT sql FROM sqlite_master WHERE type = 'table'")]
        rows = [json.loads(line) for line in questions.read_text().splitlines() if line.strip()]
    except (sqlite3.Error, ValueError, OSError) as error:
        raise NoSuch(f"{id} or its questions cannot be read: {error}.") from error
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get("question"), str) or "answer" not in row:
            raise NoSuch(f"Line {number} of {questions} has no question with an answer.")
    if not rows:
        raise NoSuch(f"{questions} holds no questions.")
    return Session(Database(script), "\n".join(text for text in tables if text), rows)


class Session:
    """A turn is a query, or `ANSWER:` and the answer. A query that is wrong is told why."""

    def __init__(self, base: Database, tables: str, rows: list[dict[str, Any]]):
        self.base, self.tables, self.rows = base, tables, rows
        self.row: dict[str, Any] = {}
        self.asked = False

    def reset(self, seed: int) -> str:
        self.row, self.asked = self.rows[seed % len(self.rows)], False
        return f"{self.tables}\n\n{self.row['question']}"

    def step(self, said: str) -> tuple[str, float, bool]:
        answer = re.search(r"ANSWER:\s*(.*)", said, re.DOTALL)
        if answer:
            return "", float(_same(answer[1], self.row["answer"])), True
        fenced = re.findall(r"```(?:sql)?\s*(.*?)```", said, re.DOTALL)
        self.asked = True
        found = self.base.query(fenced[-1] if fenced else said)
        if found.error:
            return f"Error: {found.error}", 0.0, False
        lines = [" | ".join(str(value) for value in row) for row in found.rows[:ROWS]]
        more = [f"… {len(found.rows) - ROWS} more rows"] if len(found.rows) > ROWS else []
        return "\n".join([*lines, *more]) or "no rows", 0.0, False

    def expert(self) -> str | None:
        if not self.asked and isinstance(self.row.get("sql"), str):
            return str(self.row["sql"])
        return f"ANSWER: {self.row['answer']}"


def _same(said: str, right: Any) -> bool:
    """Whether two answers are the same number, or the same words."""
    said, wanted = said.strip(), str(right).strip()
    try:
        return abs(float(said) - float(wanted)) <= 1e-6 * max(1.0, abs(float(wanted)))
    except ValueError:
        return said.lower() == wanted.lower()
