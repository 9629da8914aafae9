"""The workers of a spread run: a lane for each, its time busy or waiting, and how old what was learned from is."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from panoply.report.run_index import WORKERS, RunIndex

COLUMNS = 240
"""Of a lane: the steps of longer runs are put together."""
MOST = 4096
"""Lanes that are told of; what a file says of more workers is counted and not drawn."""
SUMMED = ("busy", "wait", "tokens")
NEWEST = ("memory_mb", "version", "restarts")
"""What is summed over the steps of a column, and of what the largest is meant."""

SHARE = re.compile("lag_[0-9]{1,4}")
Told = dict[str, float]


class Workers:
    """What `workers.jsonl` says, brought up to date when asked; old lines are read once only.

    A line is of one worker and step. A resumed run may say a step again: what was said last holds.
    """

    def __init__(self, index: RunIndex, run: str):
        self.index, self.run = index, run
        self.unreadable = 0
        """How many whole lines say nothing of a worker."""
        self._steps: dict[str, dict[int, Told]] = {}
        self._who: dict[str, tuple[str, str]] = {}
        self._end, self._lost = 0, 0
        self._lock = threading.Lock()

    def to_json(self) -> dict[str, Any]:
        """Lanes, learners first, each cut into the same `columns` of steps, and the lag of what was learned from."""
        with self._lock:
            self._read()
            names = sorted(self._steps, key=lambda name: (self._who[name][0], _natural(name)))
            steps = sorted(set().union(*self._steps.values())) if names else []
            columns = _columns(steps)
            lanes = [self._lane(name, columns) for name in names[:MOST]]
        return {
            "columns": [[column[0], column[-1]] for column in columns],
            "longest": _longest(lanes, len(columns)),
            "lanes": lanes,
            "left_out": len(names) - len(lanes),
            "unreadable": self.unreadable,
            "lag": lag(self.index.metrics(self.run)) if lanes else None,
        }

    def _lane(self, name: str, columns: Sequence[Sequence[int]]) -> dict[str, Any]:
        role, node = self._who[name]
        said = self._steps[name]
        lane: dict[str, Any] = {"worker": name, "role": role, "node": node}
        for field in (*SUMMED, *NEWEST):
            of_columns = (
                [said[s][field] for s in column if s in said and field in said[s]] for column in columns
            )
            join = sum if field in SUMMED else max
            lane[field] = [_round(join(found)) if found else None for found in of_columns]
        return lane

    def _read(self) -> None:
        if self.index.size(self.run, WORKERS) < self._end:  # resumed from an earlier step, and written anew
            self._steps, self._who, self._end, self._lost = {}, {}, 0, 0
        bad: list[Any] = []
        for line in self.index.lines(self.run, WORKERS, self._end, bad.append):
            self._lost += len(bad) + (not self._take(line.value))
            self._end = line.end
            bad.clear()
        self.unreadable = self._lost + len(bad)

    def _take(self, line: Mapping[str, Any]) -> bool:
        step, name = line.get("step"), line.get("worker")
        if not (isinstance(step, int) and 0 <= step < 2**53 and isinstance(name, str) and name.isprintable()):
            return False
        role, node = (str(line.get(key) or "")[:80] for key in ("role", "node"))
        self._who[name] = role, node
        numbers = {field: line[field] for field in (*SUMMED, *NEWEST) if _is_number(line.get(field))}
        self._steps.setdefault(name, {})[step] = numbers
        return True


def lag(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """By how many versions the weights that drew a step's decisions were older than the newest: mean, lowest, highest.

    `lag_3` is the share of decisions that were three versions old; the lowest is the smallest of those that are there.
    """
    known = [row for row in rows if _is_number(row.get("lag"))]
    if not known:
        return None
    found = {
        "x": [row["step"] for row in known],
        "mean": [row["lag"] for row in known],
        "low": [min((int(k[4:]) for k in row if SHARE.fullmatch(k)), default=row["lag"]) for row in known],
        "high": [row["lag_max"] if _is_number(row.get("lag_max")) else row["lag"] for row in known],
    }
    return {"label": "lag", "runs": ["lowest", "highest"], **found}


def _columns(steps: Sequence[int]) -> list[Sequence[int]]:
    """Steps that are drawn together: as many in each."""
    size = max(1, -(-len(steps) // COLUMNS))
    return [steps[at : at + size] for at in range(0, len(steps), size)]


def _longest(lanes: Sequence[Mapping[str, Any]], columns: int) -> list[float]:
    """Of each column, the most seconds that a worker accounts for: a step lasts equally long for all of them."""
    spent = [
        [(lane["busy"][at] or 0.0) + (lane["wait"][at] or 0.0) for lane in lanes] for at in range(columns)
    ]
    return [_round(max(of_lanes)) for of_lanes in spent]


def _natural(name: str) -> tuple[str, int]:
    """sampler-10 after sampler-9."""
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and abs(value) < 1e15
    )


def _round(value: float) -> float:
    return float(f"{value:.6g}")
