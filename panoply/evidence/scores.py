"""One number of a finished run, and the curve that leads to it.

| metric | number | curve |
|---|---|---|
| `success` | the last held-out rate: success of sampled answers | held-out rates |
| `area` | the mean height of that curve over the whole budget | the same |
| `held_out_NAME` | another held-out mean, such as `held_out_greedy` | its values, from the start on |
| `area:held_out_NAME` | the mean height of that | the same |
| `pass@K`, `distinct@K` | of K sampled answers to each held-out problem of the last policy | held-out rates |
| `world:NAME` | what the world measures of the last policy under that name (`world.measure`) | held-out rates |
| `NAME` | what a step logs under that name, mean over the last fifth of the steps | what was logged |
| `NAME/OTHER` | the ratio of two such means | the ratio of what was logged |
| `mean:NAME` | the mean over all steps | what was logged |
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from panoply.checkpoint import write_atomically
from panoply.errors import unknown
from panoply.evidence import cache, statistics
from panoply.files import is_file, read_json
from panoply.run import Run

MEASURES = "measures.json"
TAIL = 0.2
"""The share of a run's steps whose logged numbers are averaged."""
OF_WORLD = "world:"
"""Before the name of what a world measures itself."""
Curve = list[tuple[float, float]]
UNITS = ("episodes", "decisions", "decode_steps", "steps", "seconds")


@dataclass(frozen=True)
class Scored:
    """What a run came to."""

    value: float
    curve: Curve
    """(spent budget, score), from the start on."""
    seconds: float
    diverged: bool


def read(folder: Path, metric: str, unit: str, budget: float) -> Scored:
    """The score of a finished run, with its curve over the budget's unit."""
    if is_file(folder / cache.STAGES):
        return _read_stages(folder, metric, unit, budget)
    run = Run.open(folder)
    result: dict[str, Any] = dict(run.result() or {})
    records = run.metrics()
    curve = _curve(result, records, metric, unit)
    if not curve:
        names = {n for r in records for n, v in r.items() if isinstance(v, float | int)}
        raise unknown(f"metric of {folder.name}", metric.split("/")[0], {*names, "success", "area"})
    if asks(metric):
        value = _measured(run.folder)[metric]
    elif metric.startswith("area"):
        value = statistics.area(curve, budget)
    else:
        value = curve[-1][1] if metric == "success" else _tail(records, metric)
    seconds = float(result.get("seconds", records[-1]["seconds"] if records else 0.0))
    return Scored(float(value), curve, seconds, "diverged" in result)


def is_held_out(metric: str) -> bool:
    """Whether a metric is read off what evaluations measure, from the start on."""
    return metric in ("success", "area") or metric.removeprefix("area:").startswith("held_out_")


def _read_stages(folder: Path, metric: str, unit: str, budget: float) -> Scored:
    """The score of a recipe: of its last run, on a curve over what all stages have spent, one after another.

    Where the budget is for one stage, only its runs are on the curve. Stages that are judged by something else, as
    reward models are by accuracy, only spend.
    """
    runs = [Run.open(at) for at in cache.stages(folder, all=False).values()]
    results: list[dict[str, Any]] = [dict(run.result() or {}) for run in runs]
    name = judged_by(results[-1]["before"])
    curve: Curve = []
    before = 0.0
    for run, result in zip(runs, results, strict=True):
        records = run.metrics()
        if run.config["plan"]["method"]["id"].startswith("make."):
            continue
        if judged_by(result["before"]) == name:
            own = _curve(result, records, metric, unit)
            curve += [(before + x, y) for x, y in own if not curve or x > 0]
        before += spent(records[-1], unit) if records else 0.0
    last = read(runs[-1].folder, metric, unit, budget)
    value = statistics.area(curve, budget) if metric.startswith("area") else last.value
    return Scored(value, curve, sum(float(r.get("seconds", 0.0)) for r in results), last.diverged)


def _curve(result: Mapping[str, Any], records: Sequence[Mapping[str, Any]], metric: str, unit: str) -> Curve:
    word = metric.removeprefix("area:")
    if word in ("success", "area") or asks(metric):
        return _held_out(result, records, unit)
    name = word.removeprefix("held_out_")
    if name != word and _rate(result["before"], name) is not None:
        return _held_out(result, records, unit, name)
    return _logged(records, word, unit)


def _rate(measured: Mapping[str, Any], name: str) -> Any:
    """A held-out mean by its name; `sampled_PART` is success on one kind of problem, where there are several."""
    return measured.get(name, measured.get("parts", {}).get(name.removeprefix("sampled_")))


def judged_by(measured: Mapping[str, Any]) -> str | None:
    """The name of the held-out rate a run is judged by: the last one that has an interval."""
    found = [name for name in measured if f"{name}_interval" in measured]
    return found[-1] if found else None


def spent(record: Mapping[str, Any], unit: str) -> float:
    name = {"steps": "step", "seconds": "seconds"}.get(unit, f"total_{unit}")
    return float(record[name])


def _held_out(
    result: Mapping[str, Any], records: Sequence[Mapping[str, Any]], unit: str, name: str | None = None
) -> Curve:
    """The start, every evaluation that was logged, and the end; of what a run is judged by, or another mean."""
    name = name or judged_by(result["before"])
    if name is None:
        return []
    measured = [r for r in records if r.get(f"held_out_{name}") is not None]
    curve = [(0.0, float(_rate(result["before"], name)))]
    curve += [(spent(r, unit), float(r[f"held_out_{name}"])) for r in measured]
    ended = records and records[-1] not in measured and "diverged" not in result
    return [*curve, (spent(records[-1], unit), float(_rate(result["after"], name)))] if ended else curve


def _logged(records: Sequence[Mapping[str, Any]], metric: str, unit: str) -> Curve:
    found = ((spent(r, unit), _ratio([r], metric)) for r in records)
    return [(x, y) for x, y in found if y is not None]


def _tail(records: Sequence[Mapping[str, Any]], metric: str) -> float:
    last = records if metric.startswith("mean:") else records[-max(1, math.ceil(TAIL * len(records))) :]
    found = _ratio(last, metric)
    return math.nan if found is None else found


def _ratio(records: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """The mean of a logged metric over some steps, or the ratio of two means; None where it was not logged."""
    means = []
    for name in metric.removeprefix("mean:").split("/"):
        values = [float(r[name]) for r in records if isinstance(r.get(name), float | int)]
        if not values:
            return None
        means.append(sum(values) / len(values))
    return means[0] if len(means) == 1 else means[0] / means[1] if means[1] else None


def uses_greedy(*metrics: str) -> bool:
    """Whether any metric is of greedy answers, which are not even written otherwise."""
    return any("greedy" in metric for metric in metrics)


# ------------------------------------------------------------------ measured on the last policy


def asks(metric: str) -> bool:
    """Whether a metric must be measured on the policy after its run."""
    return metric.startswith(OF_WORLD) or re.fullmatch(r"(pass|distinct)@[1-9]\d*", metric) is not None


def check(metric: str, world: Any) -> None:
    """Refuse a metric that the world does not measure, before any run is made."""
    if asks(metric):
        world.find_measure(metric.removeprefix(OF_WORLD))


def measure(folder: Path, metrics: Sequence[str]) -> None:
    """Measure on a finished run's last policy what is not there yet, and keep it in the run's folder."""
    from panoply import api

    if not metrics:
        return
    with cache.only_one(folder):
        known = _measured(folder)
        wanted = [metric for metric in metrics if metric not in known]
        if wanted:
            policy, world = api.load_policy(api.last_model(folder)), Run.open(folder).plan().world()
            for metric in wanted:
                known[metric] = world.measure(metric.removeprefix(OF_WORLD), policy)
            write_atomically(folder / MEASURES, json.dumps(known, indent=1))


def _measured(folder: Path) -> dict[str, float]:
    if not is_file(folder / MEASURES):
        return {}
    return read_json(folder / MEASURES, dict[str, float])
