"""Methods side by side: the same worlds, seeds, held-out problems and budget."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from panoply import extensions, session
from panoply.checkpoint import write_atomically
from panoply.errors import PanoplyError
from panoply.evidence import pictures, pool, scores, statistics
from panoply.evidence.arms import Arm, Budget, default_budget
from panoply.evidence.scores import Curve
from panoply.given import world_of
from panoply.own import in_words, is_data_file
from panoply.parts import show_value
from panoply.planning import Plan
from panoply.recipe_plans import RecipePlan
from panoply.report.layout import table
from panoply.report.shown import Shown
from panoply.rewards import here
from panoply.run import fresh_folder, versions

CACHE = Path("runs") / ".cache"
THINNED = 41


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


@dataclass(repr=False)
class Comparison(Shown):
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
    of: str = "success"
    """What evaluations measure: success, or the return of control worlds."""

    def _page(self) -> str:
        return shown(self)

    @property
    def metric_shown(self) -> str:
        names = {"success": f"held-out {self.of}", "area": f"area under held-out {self.of}"}
        return names.get(self.metric, self.metric)

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
            "settings": {
                path: v if isinstance(v, str | int | float | bool | None) else show_value(v)
                for path, v in {
                    **result.arm.changed(),
                    **result.arm.slots,
                    **result.arm.settings,
                }.items()
            },
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
            held_out = self.metric in ("success", "area") or scores.asks(self.metric)
            drawn = f"held-out {self.of}" if held_out else self.metric
            wanted.append((folder / name, lines, budget.unit, f"{drawn} on {world}"))
        taus = thresholds(self.results)
        profiles = [
            pictures.Line(r.arm.label, taus, list(statistics.profile(r.table(), taus))) for r in finished
        ]
        wanted.append((folder / "profile.svg", profiles, f"{self.metric_shown} above", "share of runs"))
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
    *methods: Any,
    world: Any = None,
    seeds: int | Sequence[int] = 5,
    budget: str | None = None,
    metric: str = "success",
    workers: int | None = None,
    cluster: str | None = None,
    folder: str | Path | None = None,
    cache: str | Path = CACHE,
    watch: pool.Watch | None = None,
    command: str = "",
    **choices: Any,
) -> Comparison:
    """Run several methods on the same worlds, seeds and held-out problems at equal budget, and keep the result.

    A method may come with changes: `grpo:update.lr=1e-3`, `grpo+credit=gigpo`; it may be a value, and
    `{"mine": grpo().but(…)}` gives it a name. Where no world is named it is the first
    method's home, or `chain`. `budget` is `episodes=N`, `decisions=N`, `decode_steps=N`, `steps=N`, `seconds=N` or
    `signal:NAME=N`; as many episodes as the first method takes by default, where none is given.
    `cluster` is where runs are made, as that of `panoply.train`; here where it is left out.
    `choices` are those of `panoply.train`, the same for all.
    """
    extensions.check_not_loading()
    arms = [arm for given in methods for arm in Arm.of(given)]
    if len(arms) < 2:
        raise PanoplyError("A comparison needs at least two methods, such as panoply compare grpo rloo.")
    if len({arm.label for arm in arms}) < len(arms):
        raise PanoplyError("A method is named twice; change something in one of them, or leave it out.")
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not numbers:
        raise PanoplyError("A comparison needs at least one seed.")
    choices = in_words(choices)
    for plugin in choices.get("plugins") or ():
        extensions.load_plugin(plugin)
    worlds, of_world = _worlds(world, choices, arms[0])
    if of_world:
        choices["settings"] = {**of_world, **(choices.get("settings") or {})}
    fixed = {w: Budget.parse(budget) if budget else default_budget(arms[0], w, **choices) for w in worlds}
    measures = (metric,) if scores.asks(metric) else ()
    orders = {
        (arm.label, w, seed): pool.Order(
            f"{arm.label} {w} s{seed}",
            arm.plan(w, seed, fixed[w], greedy=scores.uses_greedy(metric), **choices),
            measures,
        )
        for seed in numbers
        for w in worlds
        for arm in arms
    }
    for order in orders.values():
        for made in order.plan.values() if isinstance(order.plan, RecipePlan) else [order.plan]:
            _check_elsewhere(made)
        scores.check(metric, order.plan.world())
    if len(worlds) > 1 and any(measured_in(order.plan) == "return" for order in orders.values()):
        raise PanoplyError("Returns of several worlds are not on one scale: compare in one world at a time.")
    pool.run_all(list(orders.values()), Path(cache), workers, watch, cluster)
    pool.check_any(list(orders.values()), "this comparison")
    results = [_result(arm, worlds, orders, metric, fixed) for arm in arms]
    failed = {o.name: o.problem for o in orders.values() if o.problem is not None}
    of = {measured_in(order.plan) for order in orders.values()}
    found = Comparison(fixed, metric, worlds, numbers, results, failed, command, of=of.pop())
    found.save(Path(folder) if folder else fresh_folder(["compare", *worlds]))
    return found


def _worlds(given: Any, choices: Mapping[str, Any], first: Arm) -> tuple[list[str], dict[str, Any]]:
    """The names of the worlds, and the settings of one that was given as a value."""
    if isinstance(given, list | tuple):
        if any(not isinstance(one, str) for one in given):
            raise PanoplyError("Several worlds are given by name.")
        return list(given), {}
    name, settings = world_of(given)
    return [name or ("jsonl" if is_data_file(choices.get("data")) else first.home())], settings


def _check_elsewhere(made: Plan) -> None:
    """Runs are made in processes of their own, which must find everything a plan is made of."""
    why = session.missing(made)
    for word in made.world_options.get("rewards", ()):
        if here.is_here(word):
            name = word.partition(":")[2]
            why = f"The reward function '{name}' exists in this process alone: name it as reward='FILE.py:{name}'."
    if why is not None:
        raise PanoplyError(f"Runs that are compared have processes of their own. {why}")


def measured_in(made: Plan | RecipePlan) -> str:
    """What is measured in a plan's world: success on problems, or returns."""
    return "success" if made.world().medium == "text" else "return"


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
        f"{found.metric_shown} on {', '.join(found.worlds)}; every run {spent}, the same {len(found.seeds)} seeds and "
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
