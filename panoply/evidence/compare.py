"""Methods side by side: the same worlds, seeds, held-out problems and budget."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from panoply import api, registry
from panoply.checkpoint import write_atomically
from panoply.errors import PanoplyError, unknown
from panoply.evidence import pictures, pool, scores, statistics
from panoply.evidence.scores import UNITS, Curve
from panoply.parts import Part, show_value
from panoply.planning import Plan
from panoply.report.text import table
from panoply.run import fresh_folder, versions

CACHE = Path("runs") / ".cache"
POINTS = 10
"""How many times a run is evaluated on its way."""
THINNED = 41


@dataclass(frozen=True)
class Budget:
    """What every run may spend: so many episodes, decisions, steps or seconds."""

    unit: str
    amount: float

    @classmethod
    def parse(cls, word: str) -> Budget:
        unit, _, amount = word.partition("=")
        if unit not in UNITS:
            raise unknown("unit of a budget", unit, UNITS)
        try:
            found = float(amount.replace("_", "").replace("k", "e3").replace("M", "e6"))
        except ValueError:
            found = 0.0
        if not 0 < found < math.inf or (unit != "seconds" and found != int(found)):
            raise PanoplyError(f"A budget is a number, such as {unit}=1000 or {unit}=20k, not '{word}'.")
        return cls(unit, found)

    def __str__(self) -> str:
        return f"{self.amount:,.0f} {self.unit}" if self.unit != "seconds" else f"{self.amount:g} seconds"

    def options(self, made: Plan) -> dict[str, Any]:
        """As options of a run. Steps are then at most as many as the budget allows."""
        if self.unit == "seconds":
            return {"minutes": self.amount / 60, "steps": 10**6}
        if self.unit == "steps":
            return {"steps": int(self.amount)}
        return {self.unit: int(self.amount), "steps": max(1, math.ceil(self.amount / episodes_a_step(made)))}


def episodes_a_step(made: Plan) -> int:
    """How many episodes a step of a method collects at least."""
    slots = made.method.slots()
    source = slots.get("sample", slots.get("data"))
    settings = source.settings() if isinstance(source, Part) else {}
    return int(settings.get("prompts", settings.get("batch", 1)) * settings.get("group", 1))


@dataclass(frozen=True)
class Arm:
    """One of the things compared: a method, with parts borrowed and settings changed."""

    label: str
    method: str
    slots: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, word: str) -> Arm:
        """`grpo`, `grpo:update.lr=1e-3`, `grpo+credit=gigpo`, `fast=grpo:sample.group=16,update.lr=1e-3`."""
        label, named, spelled = word.partition("=")
        if not named or re.search(r"[:+,]", label):
            label, spelled = word, word
        method, *changes = re.split(r"[:+,](?=[a-z_]+(?:\.\w+)*=)", spelled)
        slots: dict[str, str] = {}
        settings: dict[str, str] = {}
        for change in changes:
            path, _, value = change.partition("=")
            if not value:
                raise PanoplyError(f"'{word}' changes {path} to nothing: write METHOD:PATH=VALUE.")
            (slots if path in api.SLOT_NAMES else settings)[path] = value
        if not method or re.search(r"[:,=]", method):
            raise PanoplyError(f"'{word}' is not a method with changes: write METHOD:PATH=VALUE,PATH=VALUE.")
        return cls(label, method, slots, settings)

    def spelled(self) -> str:
        """What `parse` reads, without a name of its own."""
        changes = [f"{path}={show_value(v)}" for path, v in {**self.slots, **self.settings}.items()]
        return ":".join([self.method, *([",".join(changes)] if changes else [])])

    def but(self, settings: Mapping[str, Any]) -> Arm:
        return Arm(self.label, self.method, self.slots, {**self.settings, **settings})

    def plan(self, world: str, seed: int, budget: Budget | None, **choices: Any) -> Plan:
        """The plan of one run; refused here what cannot be run."""
        if registry.is_recipe(self.method):
            raise PanoplyError(f"'{self.method}' is a recipe of several runs, and only methods are compared.")
        shared = dict(choices.pop("settings", None) or {})
        settings = {**shared, **self.settings}
        given = {**self.slots, **{k: v for k, v in choices.items() if v is not None}}
        made = api.plan(self.method, world, seed=seed, threads=1, settings=settings, **given)
        spending = budget.options(made) if budget else {}
        steps = int(spending.get("steps", made.options.steps))
        if budget and budget.unit == "seconds":
            steps = 20 * POINTS
        elif (
            budget and budget.unit == "decisions"
        ):  # an episode has about as many as an answer may have tokens
            steps //= getattr(made.world(), "max_tokens", 1)
        paced = {"run.evaluate_every": max(1, steps // POINTS), "run.keep": 1, "run.checkpoint_every": 50}
        settings = {**paced, **settings}
        return api.plan(self.method, world, seed=seed, threads=1, settings=settings, **{**given, **spending})


def default_budget(arm: Arm, world: str, **choices: Any) -> Budget:
    """As many episodes as the first method collects in its own number of steps."""
    made = arm.plan(world, 0, None, **choices)
    return Budget("episodes", made.options.steps * episodes_a_step(made))


# ------------------------------------------------------------------ comparing


@dataclass
class Result:
    """What one arm came to."""

    arm: Arm
    method_id: str
    scores: dict[str, dict[int, float]]
    """By world and seed."""
    areas: dict[str, dict[int, float]]
    curves: dict[str, dict[int, Curve]]
    seconds: list[float] = field(default_factory=list)
    diverged: int = 0
    folders: list[str] = field(default_factory=list)

    def table(self, of: str = "scores") -> list[list[float]]:
        """`[runs, worlds]` of the seeds that have finished everywhere."""
        found: dict[str, dict[int, float]] = getattr(self, of)
        seeds = sorted(set.intersection(*(set(s) for s in found.values())))
        return [[found[world][seed] for world in found] for seed in seeds]


@dataclass
class Comparison:
    """All arms, and what was equal for them."""

    budget: dict[str, Budget]
    """By world."""
    metric: str
    worlds: list[str]
    seeds: list[int]
    results: list[Result]
    failed: dict[str, str]
    command: str = ""
    folder: Path | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": "comparison",
            "command": self.command,
            "date": time.strftime("%Y-%m-%d"),
            "versions": versions(),
            "metric": self.metric,
            "worlds": self.worlds,
            "budget": {world: {b.unit: b.amount} for world, b in self.budget.items()},
            "seeds": self.seeds,
            "arms": [self._arm(result) for result in self.results],
            "failed": self.failed,
        }

    def _arm(self, result: Result) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "label": result.arm.label,
            "method": result.method_id,
            "settings": {**result.arm.slots, **result.arm.settings},
        }
        found = result.table()
        if found:
            first = self.results[0].table()
            facts |= {
                "seeds": len(found),
                "iqm": round(float(statistics.interquartile_mean(found)), 5),
                "interval": _rounded(statistics.interval(found)),
                "area": round(float(statistics.interquartile_mean(result.table("areas"))), 5),
                "seconds": round(sum(result.seconds) / len(result.seconds), 2),
                "diverged": result.diverged,
            }
            if first and result is not self.results[0]:
                facts["improvement"] = round(statistics.improvement(found, first), 4)
                facts["improvement_interval"] = _rounded(statistics.improvement_interval(found, first))
            taus = thresholds(self.results)
            facts["profile"] = [
                [t, round(float(s), 4)] for t, s in zip(taus, statistics.profile(found, taus), strict=True)
            ]
        for name in ("scores", "areas"):
            facts[name] = {
                w: {str(s): round(v, 5) for s, v in by.items()} for w, by in getattr(result, name).items()
            }
        facts["curves"] = {w: {str(s): thin(c) for s, c in by.items()} for w, by in result.curves.items()}
        return {**facts, "runs": result.folders}

    def save(self, folder: Path) -> list[Path]:
        """`comparison.json` and pictures of curves and profiles."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        facts = self.to_json()
        write_atomically(folder / "comparison.json", json.dumps(facts, indent=1, ensure_ascii=False))
        finished = [r for r in self.results if r.table()]
        wanted = []
        for world in self.worlds:
            budget = self.budget[world]
            lines = [
                pictures.learning_line(r.arm.label, list(r.curves[world].values()), budget.amount)
                for r in finished
            ]
            name = "curves.svg" if len(self.worlds) == 1 else f"curves-{world}.svg"
            shown = "held-out success" if self.metric in ("success", "area") else self.metric
            wanted.append((folder / name, lines, budget.unit, f"{shown} on {world}"))
        taus = thresholds(self.results)
        profiles = [
            pictures.Line(r.arm.label, taus, list(statistics.profile(r.table(), taus))) for r in finished
        ]
        wanted.append((folder / "profile.svg", profiles, f"{self.metric} above", "share of runs"))
        return pictures.draw_all(wanted)


def thresholds(results: Sequence[Result]) -> list[float]:
    """Where profiles are looked at: a hundredth apart from 0 to 1, or between the extremes of other scores."""
    found = [v for r in results for row in r.table() for v in row]
    low, high = min([0.0, *found]), max([1.0, *found])
    return [round(low + (high - low) * i / 100, 6) for i in range(101)]


def thin(curve: Curve) -> list[list[float]]:
    """A curve with at most some dozens of points, the last one among them."""
    step = max(1, math.ceil(len(curve) / THINNED))
    kept = sorted({*range(0, len(curve), step), len(curve) - 1})
    return [[round(curve[i][0], 3), round(curve[i][1], 5)] for i in kept]


def _rounded(pair: tuple[float, float]) -> list[float]:
    return [round(pair[0], 5), round(pair[1], 5)]


def compare(
    *methods: str,
    world: str | Sequence[str] = "chain",
    seeds: int | Sequence[int] = 5,
    budget: str | None = None,
    metric: str = "success",
    workers: int | None = None,
    folder: str | Path | None = None,
    cache: str | Path = CACHE,
    watch: pool.Watch | None = None,
    command: str = "",
    **choices: Any,
) -> Comparison:
    """Run several methods on the same worlds, seeds and held-out problems at equal budget, and keep the result.

    A method may come with changes: `grpo:update.lr=1e-3`, `grpo+credit=gigpo`. `budget` is `episodes=N`, `decisions=N`,
    `steps=N` or `seconds=N`; as many episodes as the first method takes by default, where none is given. `choices` are
    those of `panoply.train`, the same for all.
    """
    if len(methods) < 2:
        raise PanoplyError("A comparison needs at least two methods, such as panoply compare grpo rloo.")
    arms = [Arm.parse(word) for word in methods]
    if len({arm.label for arm in arms}) < len(arms):
        raise PanoplyError("A method is named twice; change something in one of them, or leave it out.")
    worlds = [world] if isinstance(world, str) else list(world)
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers:
        raise PanoplyError("A comparison needs at least one seed.")
    for plugin in choices.get("plugins") or ():
        registry.load_plugin(plugin)
    fixed = {w: Budget.parse(budget) if budget else default_budget(arms[0], w, **choices) for w in worlds}
    measures = (metric,) if scores.asks(metric) else ()
    orders = {
        (arm.label, w, seed): pool.Order(
            f"{arm.label} {w} s{seed}", arm.plan(w, seed, fixed[w], **choices), measures
        )
        for seed in numbers
        for w in worlds
        for arm in arms
    }
    pool.run_all(list(orders.values()), Path(cache), workers, watch)
    pool.check_any(list(orders.values()), "this comparison")
    results = [_result(arm, worlds, orders, metric, fixed) for arm in arms]
    failed = {o.name: o.problem for o in orders.values() if o.problem is not None}
    found = Comparison(fixed, metric, worlds, numbers, results, failed, command)
    found.save(Path(folder) if folder else fresh_folder(["compare", *worlds]))
    return found


def _result(
    arm: Arm,
    worlds: Sequence[str],
    orders: Mapping[tuple[str, str, int], pool.Order],
    metric: str,
    budget: Mapping[str, Budget],
) -> Result:
    mine = [(w, seed, order) for (label, w, seed), order in orders.items() if label == arm.label]
    result = Result(
        arm,
        mine[0][2].plan.method_id,
        {w: {} for w in worlds},
        {w: {} for w in worlds},
        {w: {} for w in worlds},
    )
    for w, seed, order in mine:
        if order.problem is not None:
            continue
        found = scores.read(order.folder, metric, budget[w].unit, budget[w].amount)
        result.scores[w][seed], result.curves[w][seed] = found.value, found.curve
        result.areas[w][seed] = statistics.area(found.curve, budget[w].amount)
        result.seconds.append(found.seconds)
        result.diverged += found.diverged
        result.folders.append(str(order.folder))
    return result


# ------------------------------------------------------------------ what is printed


def shown(found: Comparison) -> str:
    """The comparison as a table, and what it rests on."""
    facts = found.to_json()
    first = found.results[0].arm.label
    head = ("method", "seeds", "IQM", "95 % interval", f"P(> {first})", "area", "seconds")
    rows = [head, *(_row(arm) for arm in facts["arms"])]
    budgets = {str(b) for b in found.budget.values()}
    spent = budgets.pop() if len(budgets) == 1 else ", ".join(f"{b} on {w}" for w, b in found.budget.items())
    notes = [
        f"{found.metric} on {', '.join(found.worlds)}; every run {spent}, the same {len(found.seeds)} seeds and "
        "held-out problems.",
        "IQM: interquartile mean over runs, with a stratified bootstrap interval. P: how likely a run scores higher "
        f"than one of {first}. Area: mean height of the curve over the budget. Seconds: a run's, on one thread.",
    ]
    lost = sum(arm.get("diverged", 0) for arm in facts["arms"])
    notes += [f"{lost} diverged and count with their last evaluation."] if lost else []
    notes += [f"Not finished: {', '.join(found.failed)}."] if found.failed else []
    notes += [f"Numbers, curves and profiles: {found.folder}"] if found.folder else []
    return "\n".join([table(rows, margin=0), "", *(table([(note,)], margin=0) for note in notes)])


def _row(arm: Mapping[str, Any]) -> tuple[str, ...]:
    if "iqm" not in arm:
        return (str(arm["label"]), "0", "–", "no run has finished", "–", "–", "–")
    better = "–"
    if "improvement" in arm:
        low, high = arm["improvement_interval"]
        better = f"{arm['improvement']:.2f} ({low:.2f}–{high:.2f})"
    low, high = arm["interval"]
    span = f"{low:.3f}–{high:.3f}" if low >= 0 else f"{low:.3f} to {high:.3f}"
    return (
        str(arm["label"]),
        str(arm["seeds"]),
        f"{arm['iqm']:.3f}",
        span,
        better,
        f"{arm['area']:.3f}",
        f"{arm['seconds']:.1f}",
    )
