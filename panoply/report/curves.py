"""Curves of runs: seeds of one experiment together, as a mean with the range it lies in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = Sequence[Mapping[str, Any]]
Floats = NDArray[np.float64]
POINTS = 1000
"""More points than a screen has columns are averaged together."""
FIRST = (
    "held_out_sampled",
    "held_out_greedy",
    "held_out",
    "reward",
    "success",
    "entropy",
    "episode_length",
    "loss",
)
"""Metrics in the order of what is looked at first; evaluations come before all else."""
LARGEST = 10**300
"""Whole numbers from here on are no measurement, whatever a file says."""
DULL = ("seconds_", "peak_memory", "step0_", "groups_asked", "updates", "seconds", "step")


@dataclass(frozen=True)
class Experiment:
    """Runs that differ in their seed alone."""

    label: str
    runs: tuple[str, ...]
    rows: tuple[Rows, ...]


@dataclass(frozen=True)
class Curve:
    """One metric of an experiment: at each x the mean over the seeds that got there, the lowest and the highest."""

    label: str
    runs: tuple[str, ...]
    x: Floats
    mean: Floats
    low: Floats
    high: Floats

    def to_json(self) -> dict[str, Any]:
        plain = {name: _plain(getattr(self, name)) for name in ("x", "mean", "low", "high")}
        return {"label": self.label, "runs": list(self.runs), **plain}


def curve(experiment: Experiment, metric: str, x: str = "step", smooth: float = 0.0) -> Curve:
    """`x` is step, seconds or decisions (all of them so far). Seeds are aligned by step; x is their mean there.

    smooth: the weight of the past in an exponential average of each seed, 0 for none.
    """
    values, places = [], []
    for rows in experiment.rows:
        counted = _placed(rows, x)
        known = [(r["step"], counted[i], r[metric]) for i, r in enumerate(rows) if _has(r, metric)]
        steps = [int(step) for step, _, _ in known]
        values.append(dict(zip(steps, _smoothed([float(v) for _, _, v in known], smooth), strict=True)))
        places.append(dict(zip(steps, (float(at) for _, at, _ in known), strict=True)))
    steps = sorted(set().union(*values)) if values else []
    table = _table(values, steps)
    where = _table(places, steps)
    if not steps:
        none = np.zeros(0)
        return Curve(experiment.label, experiment.runs, none, none, none, none)
    folded = [
        _fold(column) for column in (_mean(where), _mean(table), np.nanmin(table, 0), np.nanmax(table, 0))
    ]
    return Curve(experiment.label, experiment.runs, *folded)


def metric_names(many: Iterable[Rows]) -> list[str]:
    """Every number that any run logged, what is looked at first in front and what is dull at the end."""
    names = dict.fromkeys(k for rows in many for row in rows for k in row if _has(row, k))
    return ordered(names)


def ordered(names: Iterable[str]) -> list[str]:
    def place(name: str) -> tuple[int, str]:
        if name in FIRST:
            return FIRST.index(name), name
        if name.startswith("held_out_"):
            return 0, name
        return (200 if name.startswith(DULL) else 100), name

    return sorted((n for n in set(names) if n not in ("step", "seconds")), key=place)


# ------------------------------------------------------------------ configurations


def flat(value: Any, path: str = "") -> dict[str, str]:
    """A plan as paths and words; of a part its name comes first."""
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, inner in value.items():
            found |= flat(inner, path if key == "part" else f"{path}.{key}" if path else str(key))
        return found
    if isinstance(value, list):
        if any(isinstance(v, Mapping) for v in value):
            return {k: v for i, inner in enumerate(value) for k, v in flat(inner, f"{path}.{i}").items()}
        return {path: ", ".join(map(_show, value)) or "–"}
    return {path: _show(value)}


def settings_of(plan: Mapping[str, Any]) -> dict[str, str]:
    """The settings of a plan as `--set` names them: its method's without a prefix."""
    found = {}
    for path, word in flat({k: plan.get(k) for k in ("method", "world", "run")}).items():
        if path in ("method.id", "world.id"):
            found[path.removesuffix(".id")] = word
        elif path not in ("world", "run") or word != "none":
            found[path.removeprefix("method.")] = word
    return found


def differences(plans: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The settings in which experiments differ: a path, and each one's value (– where it has no such setting).

    Settings of one slot stand together.
    """
    all_settings = [settings_of(plan) for plan in plans.values()]
    paths = dict.fromkeys(path for settings in all_settings for path in settings)
    slots = list(dict.fromkeys(path.split(".")[0] for path in paths))
    rows = [(path, [s.get(path, "–") for s in all_settings]) for path in paths if path != "run.seed"]
    differing = [(path, values) for path, values in rows if len(set(values)) > 1]
    return sorted(differing, key=lambda row: slots.index(row[0].split(".")[0]))


def labels(plans: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """A short name for each experiment: method and world, and where that is not enough what else differs."""
    base = {k: " · ".join(_bare(plan, w) for w in ("method", "world")) for k, plan in plans.items()}
    found = {}
    for key, name in base.items():
        same = {k: plans[k] for k in plans if base[k] == name}
        place = list(same).index(key)
        extra = [f"{path.split('.')[-1]} {values[place]}" for path, values in differences(same)]
        found[key] = ", ".join([name, *extra[:3]])
    return found


def _bare(plan: Mapping[str, Any], what: str) -> str:
    held = plan.get(what)
    return str(held.get("id", "?") if isinstance(held, Mapping) else "?").split("@")[0]


# ------------------------------------------------------------------ numbers


def _has(row: Mapping[str, Any], name: str) -> bool:
    return _is_number(row.get(name)) and isinstance(row.get("step"), int) and _is_number(row["step"])


def _is_number(value: Any) -> bool:
    """A number, and none so large that it has no place among floats."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < LARGEST
    return isinstance(value, float)


def _placed(rows: Rows, x: str) -> list[float]:
    known = [float(r[x]) if _is_number(r.get(x)) else 0.0 for r in rows]
    return list(np.cumsum(known)) if x == "decisions" else known


def _smoothed(values: list[float], weight: float) -> list[float]:
    """Exponential average whose first values are not pulled to zero."""
    if not weight:
        return values
    total, norm, found = 0.0, 0.0, []
    for value in values:
        total, norm = weight * total + value, weight * norm + 1
        found.append(total / norm)
    return found


def _table(columns: Sequence[Mapping[int, float]], steps: Sequence[int]) -> Floats:
    return np.array([[column.get(s, np.nan) for s in steps] for column in columns], dtype=np.float64)


def _mean(table: Floats) -> Floats:
    found: Floats = np.nanmean(table, 0)
    return found


def _fold(column: Floats) -> Floats:
    if len(column) <= POINTS:
        return column
    pieces = np.array_split(column, POINTS)
    return np.array([piece.mean() for piece in pieces])


def _plain(column: Floats) -> list[float | None]:
    return [float(f"{x:.6g}") if np.isfinite(x) else None for x in column.tolist()]


def _show(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
