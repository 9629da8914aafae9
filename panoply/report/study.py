"""A study: the runs a report is about, as experiments with labels, whatever state each of them is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from panoply.errors import PanoplyError, unknown
from panoply.report.curves import Experiment, labels, metric_names
from panoply.report.drawings import Drawing
from panoply.report.judges import judge_drawings, over_optimised
from panoply.report.run_index import CONFIG, RESULT, Facts, RunIndex

SHOWN = 12
"""How many metrics are drawn where none are named."""


@dataclass(frozen=True)
class Found:
    """A run that could be read."""

    index: RunIndex
    name: str
    facts: Facts
    config: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        return self.index.root / self.name


@dataclass
class Study:
    experiments: list[Experiment]
    members: list[list[Found]]
    """The runs of each experiment."""
    metrics: list[str]
    notes: list[str] = field(default_factory=list)
    """What a reader should know: runs that could not be read, have not begun, or lack a metric."""

    @classmethod
    def of(cls, folders: Sequence[str], metrics: Sequence[str] | None = None) -> Study:
        """The runs in some folders; a folder that is no run stands for all runs below it."""
        notes: list[str] = []
        found = list(_found(folders, notes))
        if not found:
            raise PanoplyError(" ".join(notes) or "There is no run to report on.")
        groups: dict[str, list[Found]] = {}
        for run in found:
            groups.setdefault(run.facts["group"], []).append(run)
        named = labels({key: members[0].config["plan"] for key, members in groups.items()})
        experiments = [_experiment(named[key], members) for key, members in groups.items()]
        known = metric_names(rows for e in experiments for rows in e.rows)
        if not known:
            raise PanoplyError("None of these runs has finished a step yet, so there is nothing to report.")
        for metric in metrics or ():
            if metric not in known:
                raise unknown("metric of these runs", metric, known)
        chosen = list(metrics or known[:SHOWN])
        notes += _gaps(experiments, chosen)
        return cls(experiments, list(groups.values()), chosen, notes)

    def summary(self) -> str:
        counts = {"run": sum(map(len, self.members)), "experiment": len(self.experiments)}
        counts["metric"] = len(self.metrics)
        return ", ".join(f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts.items()) + "."

    def plans(self) -> dict[str, Mapping[str, Any]]:
        """Each experiment's plan by its label."""
        return {e.label: m[0].config["plan"] for e, m in zip(self.experiments, self.members, strict=True)}

    def drawings(self) -> list[tuple[str, Drawing]]:
        """Pictures of reward models, and of policies that learn from one, with whose they are."""
        found: list[tuple[str, Drawing]] = []
        for e, members in zip(self.experiments, self.members, strict=True):
            each = ((m.name, judge_drawings(m.index.json(m.name, RESULT))) for m in members)
            name, of_judge = next(((name, made) for name, made in each if made), ("", []))
            found += [(name, drawing) for drawing in of_judge]
            if (optimised := over_optimised(members[0].config["plan"], e)) is not None:
                found.append((e.label, optimised))
        return found


def _found(folders: Sequence[str], notes: list[str]) -> Iterable[Found]:
    seen: set[Path] = set()
    for folder in folders:
        path = Path(folder)
        if not path.is_dir():
            raise PanoplyError(f"There is no run folder '{folder}'.")
        alone = (path / CONFIG).is_file()
        index = RunIndex(path.resolve().parent if alone else path)
        names = [path.resolve().name] if alone else index.find()
        if not names:
            notes.append(f"'{folder}' is not a run, and there is none below it.")
        for name in names:
            facts = index.facts(name)
            if index.root / name in seen:
                continue
            seen.add(index.root / name)
            if "problem" in facts:
                notes.append(facts["problem"])
                continue
            if not facts["metrics"]:
                notes.append(f"'{name}' has not finished a step yet.")
            yield Found(index, name, facts, index.config(name))


def _experiment(label: str, members: Sequence[Found]) -> Experiment:
    return Experiment(
        label, tuple(str(m.name) for m in members), tuple(m.index.metrics(m.name) for m in members)
    )


def _gaps(experiments: Sequence[Experiment], metrics: Sequence[str]) -> list[str]:
    """Which experiments lack which of the metrics."""
    notes = []
    for e in experiments:
        logged = set(metric_names(e.rows))
        lacking = [m for m in metrics if m not in logged]
        if logged and lacking:
            notes.append(f"{e.label} does not log {', '.join(lacking)}.")
    return notes
