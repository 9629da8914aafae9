"""The catalogue as the page shows it: every registered work, its parts, and what was measured of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from panoply.files import BadFile, read_json
from panoply.report.curves import Experiment, curve

FIELDS = (
    "id",
    "paper",
    "kind",
    "says",
    "verdict",
    "difference",
    "interval",
    "seeds",
    "metric",
    "order",
    "world",
)
MORE = ("budget", "date", "command", "seconds")
"""Fields of a stored claim that are shown: in the list, and beside them on a work's own page."""


class Stored(TypedDict):
    """What is needed of a stored claim to show it."""

    id: str
    verdict: NotRequired[str]
    difference: NotRequired[float | None]
    interval: NotRequired[list[float | None]]
    curves: NotRequired[dict[str, list[list[list[float]]]]]


class Catalogue:
    """What the page shows of methods and worlds; the list imports none of them, a page the one it is about."""

    def __init__(self, results: Path | None):
        self.results = results
        self._lock = threading.Lock()

    def works(self) -> dict[str, Any]:
        from panoply import registry

        with self._lock:
            listed = registry.works()
        claims = self._claims()
        works = [
            {**of.facts(), "name": of.name, "about": of.summary, "claims": claims.get(of.name, [])}
            for of in listed
        ]
        return {"works": works}

    def work(self, id: str) -> dict[str, Any] | None:
        from panoply import compose, registry

        with self._lock:
            entry = registry.find_any(id)
        if entry is None:
            return None
        found: dict[str, Any] = {
            **entry.listed().facts(),
            "name": entry.name,
            "doc": entry.doc,
            "says": getattr(entry.claim, "says", None),
            "claims": self._claims(FIELDS + MORE).get(entry.name, []),
        }
        if entry.kind == "method":
            method = compose.resolve(entry.id).method
            found |= {"equation": method.equation(), "parts": _parts(method)}
            if entry.base is not None:
                changes = method.diff(compose.resolve(entry.base).method)
                found["changes"] = [[path, b or "–", a or "–"] for path, a, b in changes]
        if entry.kind == "recipe":
            found["stages"] = [[stage.name, stage.does] for stage in entry.build().stages]
        return found

    def _claims(self, fields: tuple[str, ...] = FIELDS) -> dict[str, list[dict[str, Any]]]:
        """Claims by the name of their work: those stored below `results`, and those shipped of all other works."""
        from panoply.evidence.verdicts import shipped

        found: dict[str, list[dict[str, Any]]] = {}
        folder = self.results / "claims" if self.results else None
        for file in sorted(folder.glob("*.json")) if folder and folder.is_dir() else ():
            with contextlib.suppress(BadFile):
                claim = read_json(file, Stored)
                found.setdefault(claim["id"].split("@")[0], []).append(_shown(claim, fields))
        return {name: [_shown(claim, fields)] for name, claim in shipped().items()} | found


def _shown(claim: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    shown = {name: claim[name] for name in fields if name in claim}
    if "command" in fields:
        shown["curves"] = _curves(claim.get("curves"))
    return shown


def _curves(stored: Any) -> list[dict[str, Any]]:
    """A claim's curves: for each side its seeds, each a list of (budget spent, what was measured)."""
    found = []
    for label, seeds in stored.items() if isinstance(stored, dict) else ():
        rows = tuple([{"step": int(x), "measured": y} for x, y in points] for points in seeds)
        names = tuple(f"seed {i}" for i in range(len(rows)))
        found.append(curve(Experiment(label, names, rows), "measured").to_json())
    return found


def _parts(method: Any) -> list[list[str]]:
    from panoply.parts import show_value

    rows = []
    for slot, value in method.slots().items():
        for held in value if isinstance(value, tuple) else (value,):
            settings = ", ".join(f"{k}={show_value(v)}" for k, v in held.settings().items())
            rows.append([slot, held.info.name, settings])
    return rows
