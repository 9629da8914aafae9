"""Claims about learning: able to tell, all sides tuned alike, paired by seed, more seeds while undecided."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from panoply.errors import PanoplyError
from panoply.evidence import pool, scores
from panoply.evidence.arms import Arm, Budget
from panoply.evidence.claims import NOT_ABLE, SEEDS, WORST, Found, Ranks, Verdict, together
from panoply.evidence.compare import CACHE, thin
from panoply.evidence.gates import closed, gate_of_problems, gates_of_baseline
from panoply.evidence.tuning import joined, tune, untuned
from panoply.parts import show_value
from panoply.planning import Plan
from panoply.recipe_plans import RecipePlan

Heat = tuple[int, dict[str, pool.Order]]
"""A seed, and every arm's run with it."""


@dataclass
class Desk:
    """Where and how claims are measured."""

    cache: Path = CACHE
    workers: int | None = None
    cluster: str | None = None
    """Where runs are made, if not on this machine: as `--cluster` of a run says it."""
    watch: pool.Watch | None = None
    most: int = SEEDS[-1]
    """The most seeds to go to."""
    first: int = 0
    """The seed to begin with."""

    def say(self, text: str) -> None:
        (self.watch or pool.Lines()).say(text)

    def rounds(self, known: Mapping[str, Any] | None) -> list[int]:
        """By how many seeds to decide, first and while undecided; with an earlier result, by as many as it had."""
        if known is not None and known["seeds"]:
            return [int(known["seeds"])]
        return [n for n in SEEDS if n <= self.most] or [self.most]


@dataclass
class Contest:
    """The arms of a claim, at the same budget in the same world."""

    claim: Ranks
    order: tuple[Any, ...]
    desk: Desk
    lost: dict[str, str] = field(default_factory=dict)
    """Runs that have failed, and why."""
    plans: dict[str, Plan | RecipePlan] = field(default_factory=dict)
    """Of each arm as it was asked for, with the first seed."""

    def __post_init__(self) -> None:
        self.arms = [arm for word in self.order for arm in Arm.of(word)]
        self.labels = [arm.label for arm in self.arms]
        self.budget = Budget.parse(self.claim.budget)
        self.sign = -1.0 if self.claim.lower else 1.0
        self.margins = self.claim.margins or (0.0,) * (len(self.order) - 1)

    def run(self, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Tune, see whether the claim is able to tell, run and judge.

        `known` is an earlier result that had a verdict, whose tuning and number of seeds are then taken over.
        """
        gates, tuning = (known.get("gates", []), known["tuning"]) if known else self.prepare()
        facts = {**self.question(), "gates": gates, "tuning": tuning, "varied": self.varied()}
        if (why := closed(gates)) is not None:
            self.desk.say(f"{self.labels[0]} is not able to tell: {why}")
            return {**facts, "verdict": NOT_ABLE, "why": why, "seeds": 0, "runs": [], "failed": self.lost}
        tuned = [arm.but(tuning["chosen"][arm.label]) for arm in self.arms]
        for n in self.desk.rounds(known):
            heats = self.heats(tuned, range(self.desk.first, self.desk.first + n))
            verdict, gap, kept = self.judge(heats)
            low, high = gap.interval
            self.desk.say(
                f"{self.labels[0]} against {', '.join(self.labels[1:])}: {verdict} at {len(heats)} seeds, "
                f"{gap.difference:+.4f} ({low:+.4f} to {high:+.4f})"
            )
            if verdict != "undecided":
                break
        found = {"verdict": verdict, **gap.to_json(), "seeds": len(heats), **kept, **self.records(heats)}
        return {**facts, **found, "failed": self.lost}

    def prepare(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """What is asked before seeds are spent, and the settings of every arm.

        The baselines come first: where they leave no room the method is not even tuned.
        """
        gates = [gate_of_problems(self)]
        tuning = tune(self, self.arms[1:]) if closed(gates) is None else untuned(self)
        if closed(gates) is None:
            gates += gates_of_baseline(self, tuning)
        if closed(gates) is None:
            tuning = joined(tuning, tune(self, self.arms[:1]))
        return gates, tuning

    def question(self) -> dict[str, Any]:
        """What is asked, as it is stored."""
        claim = self.claim
        return {
            **({"race": claim.race} if claim.race else {}),
            "world": claim.world,
            "settings": {path: show_value(value) for path, value in claim.settings.items()},
            "order": {arm.label: arm.spelled() for arm in self.arms},
            "metric": claim.metric,
            "better": "lower" if claim.lower else "higher",
            "budget": {self.budget.unit: self.budget.amount},
        }

    # -------------------------------------------------------------- runs

    def plan(self, arm: Arm, seed: int, split: str = "test") -> Plan | RecipePlan:
        """The plan of one run; logged data is made anew for every seed, where it can be made."""
        key, claim = f"{arm.label} {arm.spelled()} {split}", self.claim
        if key not in self.plans:
            greedy = scores.uses_greedy(claim.metric, claim.tuned_by, *claim.keeps, *claim.also)
            choices: dict[str, Any] = {"greedy": greedy, "split": split, "settings": dict(claim.settings)}
            self.plans[key] = arm.plan(claim.world, 0, self.budget, **choices)
        return self.plans[key].seeded(seed, world=self.makes_data)

    def orders(
        self, arms: Sequence[Arm], seeds: Sequence[int], split: str = "test", shown: Sequence[str] = ()
    ) -> list[Heat]:
        """What is to be run, every arm with every seed, and measured afterwards.

        Before seeds are spent that is what sides are tuned by, and what is asked to be `shown`.
        """
        claim = self.claim
        metrics = (claim.metric, *claim.keeps, *claim.also) if split == "test" else (claim.tuned_by, *shown)
        asked = tuple(m for m in metrics if scores.asks(m))
        for metric in asked:
            scores.check(metric, self.world)

        def order(arm: Arm, seed: int) -> pool.Order:
            return pool.Order(f"{arm.label} s{seed}", self.plan(arm, seed, split), asked)

        return [(seed, {arm.label: order(arm, seed) for arm in arms}) for seed in seeds]

    @functools.cached_property
    def world(self) -> Any:
        return self.arms[1].plan(self.claim.world, 0, self.budget, settings=dict(self.claim.settings)).world()

    @property
    def makes_data(self) -> bool:
        """Whether the world makes the data it logs, and can make other data for every seed."""
        given = any(getattr(self.world, name, None) for name in ("file", "minari", "run"))
        return hasattr(self.world, "seed") and "data" in self.world.access and not given

    def varied(self) -> str:
        """What differs from seed to seed beside the draws, or what the verdict is about one of."""
        if self.makes_data:
            return "every seed has logged data of its own"
        if "data" in self.world.access:
            return "all runs learn from the same logged data: the verdict is about this one"
        if self.world.medium == "text":
            return (
                "all runs begin with the same weights, the world's warm start: the verdict is about this one"
            )
        return "every seed has weights of its own"

    def make(self, heats: Sequence[Heat]) -> None:
        every = [order for _, side in heats for order in side.values()]
        pool.run_all(every, self.desk.cache, self.desk.workers, self.desk.watch, self.desk.cluster)
        pool.check_any(every, f"the claim on {self.labels[0]}")
        self.lost |= {o.name: o.problem for o in every if o.problem is not None}

    def heats(self, arms: Sequence[Arm], seeds: Sequence[int]) -> list[Heat]:
        """The seeds on which all arms have finished their runs."""
        found = self.orders(arms, seeds)
        self.make(found)
        whole = [(s, side) for s, side in found if all(o.problem is None for o in side.values())]
        if not whole:
            raise PanoplyError(f"No seed of the claim on {self.labels[0]} has finished on all sides.")
        return whole

    def read(self, order: pool.Order, metric: str) -> scores.Scored:
        found = scores.read(order.folder, metric, self.budget.unit, self.budget.amount)
        if not math.isfinite(found.value):
            raise PanoplyError(f"{metric} of the run {order.name} is {found.value}.")
        return found

    # -------------------------------------------------------------- judging

    def judge(self, heats: Sequence[Heat]) -> tuple[Verdict, Found, dict[str, Any]]:
        """The verdict, the gap that decides it, and what became of every part of the claim."""
        claim, (first, second) = self.claim, self.labels[:2]
        values = {metric: self.values(heats, metric, self.labels) for metric in (claim.metric, *claim.keeps)}

        def gap(metric: str, ahead: str = first, behind: str = second, sign: float = 1.0) -> Found:
            both = zip(values[metric][ahead], values[metric][behind], strict=True)
            return Found.of([sign * (a - b) for a, b in both])

        def reported(metric: str) -> dict[str, Any]:
            sides = {label: round(fmean(values[metric][label]), 6) for label in (first, second)}
            return {**gap(metric).to_json(), **sides}

        def told(metric: str) -> dict[str, Any]:
            """The same of what decides nothing, and may be measured by one side alone, as its own brake is."""
            having = [label for label in (first, second) if self.has(heats, label, metric)] or [first]
            values[metric] = self.values(heats, metric, having)
            if len(having) == 2:
                return reported(metric)
            return {having[0]: round(fmean(values[metric][having[0]]), 6)}

        pairs = [(first, other) for other in self.labels[1:]] if claim.leads else []
        pairs = pairs or list(itertools.pairwise(self.labels))
        gaps = [gap(claim.metric, a, b, self.sign) for a, b in pairs]
        rooms = [self.room(fmean(values[claim.metric][b])) for _, b in pairs]
        ruled = [g.verdict(m, room) for g, m, room in zip(gaps, self.margins, rooms, strict=True)]
        parts = {f"{a} ahead of {b}": verdict for (a, b), verdict in zip(pairs, ruled, strict=True)}
        mark, reached = self._reached(values[claim.metric][first])
        if reached is not None:
            parts["the mark is reached"] = reached.verdict()
        parts |= {f"{metric} is kept": gap(metric).verdict(margin) for metric, margin in claim.keeps.items()}
        facts: dict[str, Any] = {
            "parts": parts,
            "keeps": {
                metric: {"margin": margin, **reported(metric)} for metric, margin in claim.keeps.items()
            },
            "also": {metric: told(metric) for metric in claim.also},
            **mark,
        }
        if len(pairs) > 1:
            facts["gaps"] = [
                {"ahead": a, "behind": b, "margin": m, **g.to_json()}
                for (a, b), g, m in zip(pairs, gaps, self.margins, strict=True)
            ]
        weakest = min(
            range(len(gaps)), key=lambda i: (WORST.index(ruled[i]), self.margins[i] + gaps[i].interval[0])
        )
        if self.margins[weakest]:
            facts["margin"] = self.margins[weakest]
        if room := rooms[weakest]:
            facts["room"] = {"size": round(room, 6), "filled": round(gaps[weakest].difference / room, 4)}
        return together(list(parts.values())), gaps[weakest], facts

    def has(self, heats: Sequence[Heat], label: str, metric: str) -> bool:
        """Whether an arm measures something."""
        try:
            return all(self.read(side[label], metric) for _, side in heats)
        except PanoplyError:
            return False

    def values(self, heats: Sequence[Heat], metric: str, labels: Sequence[str]) -> dict[str, list[float]]:
        """A metric of these arms on every seed; a run that diverged counts as the worst that was seen."""
        found = {label: [self.read(side[label], metric) for _, side in heats] for label in labels}
        worst = min if self.sign > 0 or metric != self.claim.metric else max
        least = worst(scored.value for side in found.values() for scored in side)
        return {a: [least if f.diverged else f.value for f in side] for a, side in found.items()}

    def room(self, baseline: float) -> float | None:
        """How much better than the baseline one can be, where the best is known."""
        best = self.best()
        return None if best is None else max(0.0, self.sign * (best - baseline))

    def best(self) -> float | None:
        """The best value of the metric that is known."""
        claim = self.claim
        if claim.best is not None:
            return claim.best
        if claim.reaches is not None:
            return self.mark
        rate = self.world.medium == "text" and claim.metric.split("@")[0] in ("success", "area", "pass")
        return 1.0 if rate else None

    @functools.cached_property
    def mark(self) -> float:
        assert self.claim.reaches is not None
        return self.claim.reaches(self.world, self.plan(self.arms[0], 0).options.held_out)

    def _reached(self, values: Sequence[float]) -> tuple[dict[str, Any], Found | None]:
        """How far the first is beyond what it must reach, where the claim names such a mark."""
        if self.claim.reaches is None:
            return {}, None
        found = Found.of([self.sign * (value - self.mark) for value in values])
        return {"reaches": {"mark": round(self.mark, 6), **found.to_json()}}, found

    def records(self, heats: Sequence[Heat]) -> dict[str, Any]:
        """The numbers of every seed, and the curves."""
        values = self.values(heats, self.claim.metric, self.labels)
        found = [
            (s, {a: self.read(order, self.claim.metric) for a, order in side.items()}) for s, side in heats
        ]
        return {
            "runs": [
                {"seed": seed, **{label: round(values[label][i], 6) for label in self.labels}}
                for i, (seed, _) in enumerate(heats)
            ],
            "seconds_a_run": {
                a: round(sum(side[a].seconds for _, side in found) / len(found), 2) for a in self.labels
            },
            "diverged": {a: sum(side[a].diverged for _, side in found) for a in self.labels},
            "curves": {a: [thin(side[a].curve) for _, side in found] for a in self.labels},
        }
