"""Recorded episodes: an index of what is in a file, and one of them made ready to be looked at."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from typing import Any

from panoply.evaluation.surprise import oddness, surprise
from panoply.report.shelf import EPISODES, Shelf

SNIPPET = 120


class Index:
    """A line for each recorded episode of a run, brought up to date when asked; old lines are read once only."""

    def __init__(self, shelf: Shelf, run: str):
        self.shelf, self.run = shelf, run
        self._rows: list[dict[str, Any]] = []
        self._end = 0
        self._lock = threading.Lock()

    def rows(self) -> list[dict[str, Any]]:
        """Summaries in the order of the file, each with its surprise among all of them."""
        with self._lock:
            if (
                self.shelf.size(self.run, EPISODES) < self._end
            ):  # resumed from an earlier step, and written anew
                self._rows, self._end = [], 0
            for at, end, record in self.shelf.lines(self.run, EPISODES, self._end):
                self._rows.append({"at": at, **summary(record)})
                self._end = end
            found = surprise(
                [_number(r["return"]) for r in self._rows], [_number(r["odd"]) for r in self._rows]
            )
            return [{**r, "surprise": round(s, 4)} for r, s in zip(self._rows, found.tolist(), strict=True)]

    def line(self, at: int) -> bytes | None:
        """The line of the episode that begins at `at`; nothing where none does."""
        if not any(row["at"] == at for row in self.rows()):
            return None
        with self.shelf.open(self.run, EPISODES) as file:
            file.seek(at)
            return file.readline()

    def record(self, at: int) -> dict[str, Any] | None:
        """The episode that begins at `at`, made readable."""
        line = self.line(at)
        return None if line is None else readable(json.loads(line))


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a list shows of an episode."""
    reward = _known(record.get("reward"))
    advantage = _known(record.get("advantage"))
    odd = oddness(_column(record.get("logp@reference")) or _column(record.get("logp")))
    turns = _column(record.get("turn"))
    gated = {row for rows in dict(record.get("gates") or {}).values() for row in rows}
    return {
        "step": record.get("step"),
        "episode": record.get("episode"),
        "group": record.get("group"),
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


def _spoken(action: Any) -> str:
    if isinstance(action, list):
        return f"({', '.join(map(_spoken, action))})"
    return f"{action:.3g}" if isinstance(action, float) else str(action)


def _column(values: Any) -> list[Any]:
    return values if isinstance(values, list) else []


def _known(values: Any) -> list[float]:
    return [v for v in _column(values) if isinstance(v, int | float) and math.isfinite(v)]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [_finite(v) for v in value] if isinstance(value, list) else value
