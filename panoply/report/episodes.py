"""Recorded episodes: an index of what is in a file, and one of them made ready to be looked at."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Mapping
from typing import Any

from panoply.evaluation.surprise import oddness, surprise
from panoply.files import BadFile, parse_json
from panoply.report.run_index import EPISODES, RunIndex

SNIPPET = 120
NUMBERS: set[type] = {int, float, bool, type(None)}
COLUMNS: dict[str, set[type]] = {"pieces": {str}, "position": {int}, "tokens": {int}, "turn": {int}}
"""What the columns of an episode hold; all but the others below hold numbers."""
MEASURED = ("advantage", "ratio", "logp", "entropy", "reward", "value")
"""What a report says of each decision, where a record has it."""
OTHERS = ("actions", "signals", "gates", "verdicts")


class Index:
    """A line for each recorded episode of a run, brought up to date when asked; old lines are read once only."""

    def __init__(self, index: RunIndex, run: str):
        self.index, self.run = index, run
        self.unreadable = 0
        """How many whole lines hold no episode."""
        self._rows: dict[int, dict[str, Any]] = {}
        self._end, self._lost = 0, 0
        self._lock = threading.Lock()

    def rows(self) -> list[dict[str, Any]]:
        """Summaries in the order of the file, each with its surprise among all of them.

        `like` is where the first episode begins that is the same, in the same group; that one has their `count`.
        """
        with self._lock:
            self._read()
            rows = list(self._rows.values())
        found = surprise([_number(r["return"]) for r in rows], [_number(r["odd"]) for r in rows])
        return _merged([{**r, "surprise": round(s, 4)} for r, s in zip(rows, found.tolist(), strict=True)])

    def _read(self) -> None:
        if self.index.size(self.run, EPISODES) < self._end:  # resumed from an earlier step, and written anew
            self._rows, self._end, self._lost = {}, 0, 0
        bad: list[BadFile] = []
        for line in self.index.lines(self.run, EPISODES, self._end, bad.append):
            if is_episode(line.value):
                self._rows[line.start] = {"at": line.start, **summary(line.value)}
            else:
                self._lost += 1
            self._lost += len(bad)
            self._end = line.end
            bad.clear()
        self.unreadable = self._lost + len(bad)

    def line(self, at: int) -> bytes | None:
        """The line of the episode that begins at `at`; nothing where none does."""
        with self._lock:
            self._read()
            if at not in self._rows:
                return None
        with self.index.open(self.run, EPISODES) as file:
            file.seek(at)
            return file.readline()

    def record(self, at: int) -> dict[str, Any] | None:
        """The episode that begins at `at`, made readable."""
        line = self.line(at)
        return None if line is None else readable(parse_json(line, EPISODES, dict[str, Any], finite=False))


def _merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that know their like: the same was said, earned and credited, in the same group of the same step."""
    first: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        same = tuple(row[k] for k in ("step", "group", "task", "said", "return", "advantage", "gated", "end"))
        held = first.setdefault(same, row)
        row["like"] = held["at"]
        held["count"] = held.get("count", 0) + 1
    return rows


def is_episode(record: Mapping[str, Any]) -> bool:
    """Whether a record has the types of one. Columns are looked at a type at a time: they may be long."""
    for name, value in record.items():
        listed = isinstance(value, list | dict) and name not in OTHERS
        column = listed or name in COLUMNS or (name in MEASURED and value is not None)
        if column and not _are(COLUMNS.get(name, NUMBERS), value):
            return False
    gates, signals = record.get("gates", {}), record.get("signals", {})
    verdicts = record.get("verdicts", [])
    return (
        isinstance(record.get("step"), int)
        and not any(isinstance(record.get(name), list | dict) for name in ("group", "task", "said", "end"))
        and isinstance(record.get("parent"), int | None)
        and _are({list}, verdicts)
        and all([type(x) for x in pair] == [int, str] for pair in verdicts)
        and isinstance(gates, dict)
        and all(_are({int}, rows) for rows in gates.values())
        and isinstance(signals, dict)
        and all(_are({list}, pairs) and all(len(p) == 2 for p in pairs) for pairs in signals.values())
    )


def _are(types: set[type], values: Any) -> bool:
    return isinstance(values, list) and set(map(type, values)) <= types


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a list shows of an episode."""
    reward = known(record.get("reward"))
    advantage = known(record.get("advantage"))
    odd = oddness(_column(record.get("logp@reference")) or _column(record.get("logp")))
    turns = _column(record.get("turn"))
    gated = {row for rows in dict(record.get("gates") or {}).values() for row in rows}
    return {
        "step": record.get("step"),
        "episode": record.get("episode"),
        "group": record.get("group"),
        "parent": record.get("parent"),
        "nodes": len(set(_column(record.get("node")))),
        "task": str(record.get("task", "")),
        "decisions": len(turns)
        or len(_column(record.get("position")))
        or len(_column(record.get("actions"))),
        "turns": len(set(turns)) or 1,
        "return": round(sum(reward), 5) if reward else None,
        "advantage": round(sum(advantage) / len(advantage), 5) if advantage else None,
        "odd": None if math.isnan(odd) else round(odd, 5),
        "gated": len(gated),
        "left_out": bool(record.get("left_out")),
        "end": record.get("end"),
        "snippet": _snippet(record),
        "said": _said(record),
    }


def readable(record: Mapping[str, Any]) -> dict[str, Any]:
    """An episode with what an older version did not record made up for, and nothing that JSON has no word for."""
    found = {k: _finite(v) for k, v in record.items() if k != "text"}
    tokens = _column(record.get("tokens"))
    if "pieces" not in found:
        text = str(record.get("text", ""))
        whole = len(text) == len(tokens)
        found["pieces"] = list(text) if whole else [f"⟨{t}⟩" for t in tokens]
    if "actions" in found and not tokens:
        found["pieces"] = [_spoken(a) + " " for a in found["actions"]]
        found["position"] = list(range(len(found["pieces"])))
    found.setdefault("position", [])
    found.setdefault("gates", {})
    found.setdefault("signals", {})
    found.setdefault("verdicts", [])
    return found


def is_readable(line: bytes) -> bool:
    """Whether a line of this version is JSON as any reader knows it, so that it can be passed on as it is."""
    return b'"pieces": ["' in line and b"NaN" not in line and b"Infinity" not in line


def _snippet(record: Mapping[str, Any]) -> str:
    """The end of what the policy itself said."""
    pieces, position = _column(record.get("pieces")), _column(record.get("position"))
    if pieces and position:
        said = "".join(str(pieces[i]) for i in position[-SNIPPET:] if 0 <= i < len(pieces))
    elif "actions" in record:
        said = " ".join(map(_spoken, _column(record["actions"])[-12:]))
    else:
        said = str(record.get("text", ""))
    return said[-SNIPPET:]


def _said(record: Mapping[str, Any]) -> str:
    """A short name of all that was said or done, equal where that is."""
    whole = next((record[name] for name in ("tokens", "actions", "text") if name in record), None)
    return hashlib.blake2b(json.dumps(whole).encode(), digest_size=8).hexdigest()


def _spoken(action: Any) -> str:
    if isinstance(action, list):
        return f"({', '.join(map(_spoken, action))})"
    return f"{action:.3g}" if isinstance(action, float) else str(action)


def _column(values: Any) -> list[Any]:
    return values if isinstance(values, list) else []


def known(values: Any) -> list[float]:
    """The numbers of a column."""
    return [v for v in _column(values) if isinstance(v, int | float) and math.isfinite(v)]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [_finite(v) for v in value] if isinstance(value, list) else value
