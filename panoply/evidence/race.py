"""Claims about learning: all sides tuned alike, paired by seed, more seeds while undecided."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from panoply.errors import PanoplyError
from panoply.evidence import pool, scores
from panoply.evidence.arms import Arm, Budget
from panoply.evidence.claims import SEEDS, TUNING_SEEDS, WORST, Found, Ranks, Verdict, together
from panoply.evidence.compare import CACHE, thin
from panoply.parts import show_value

Point = dict[str, Any]
"""Settings of a grid."""
Heat = tuple[int, dict[str, pool.Order]]
"""A seed, and every arm's run with it."""


@dataclass
class Desk:
    """Where and how claims are measured."""

    cache: Path = CACHE
    workers: int | None = None
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
class Race:
    """The arms of a claim, at the same budget in the same world."""

    claim: Ranks
    order: tuple[Any, ...]
    desk: Desk
    lost: dict[str, str] = field(default_factory=dict)
    """Runs that have failed, and why."""

    def __post_init__(self) -> None:
        self.arms = [arm for word in self.order for arm in Arm.of(word)]
        self.labels = [arm.label for arm in self.arms]
        self.budget = Budget.parse(self.claim.budget)
        self.sign = -1.0 if self.claim.lower else 1.0
        self.margins = self.claim.margins or (0.0,) * (len(self.order) - 1)

    def run(self, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Tune, run and judge. `known` is an earlier result, whose tuning and number of seeds are then taken over."""
        claim = self.claim
        tuning = known["tuning"] if known else self.tune()
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
        return {
            "world": claim.world,
            "settings": {path: show_value(value) for path, value in claim.settings.items()},
            "order": {arm.label: arm.spelled() for arm in self.arms},
            "metric": claim.metric,
            "better": "lower" if claim.lower else "higher",
            "budget": {self.budget.unit: self.budget.amount},
            "verdict": verdict,
            **gap.to_json(),
            "seeds": len(heats),
            **kept,
            **self.records(heats),
            "tuning": tuning,
            "failed": self.lost,
        }

    # -------------------------------------------------------------- runs

    def orders(self, arms: Sequence[Arm], seeds: Sequence[int]) -> list[Heat]:
        """What is to be run: every arm with every seed."""
        claim = self.claim
        asked = tuple(m for m in (claim.metric, *claim.keeps, *claim.also) if scores.asks(m))

        def order(arm: Arm, seed: int) -> pool.Order:
            made = arm.plan(claim.world, seed, self.budget, settings=dict(claim.settings))
            return pool.Order(f"{arm.label} s{seed}", made, asked)

        return [(seed, {arm.label: order(arm, seed) for arm in arms}) for seed in seeds]

    def make(self, heats: Sequence[Heat]) -> None:
        every = [order for _, side in heats for order in side.values()]
        pool.run_all(every, self.desk.cache, self.desk.workers, self.desk.watch)
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

    # -------------------------------------------------------------- tuning

    def tune(self) -> dict[str, Any]:
        """Every arm with every point of the same grid, on seeds of their own; the best mean is chosen."""
        points = list(grid(self.claim.tune))
        seeds = TUNING_SEEDS if len(points) > 1 else ()
        heats = [self.orders([arm.but(point) for arm in self.arms], seeds) for point in points]
        self.make([temperature for of_point in heats for temperature in of_point])
        tried: list[Point] = []
        chosen: dict[str, Point] = {}
        seconds = 0.0
        for label in self.labels if seeds else ():
            best = -math.inf
            for point, of_point in zip(points, heats, strict=True):
                done = [side[label] for _, side in of_point if side[label].problem is None]
                found = [self.read(order, self.claim.metric) for order in done]
                mean = sum(f.value for f in found) / len(found) if found else math.nan
                seconds += sum(f.seconds for f in found)
                tried.append({"method": label, **point, "score": round(mean, 5) if found else None})
                if found and self.sign * mean > best:
                    best, chosen[label] = self.sign * mean, point
            if label not in chosen:
                raise PanoplyError(f"No run that tunes {label} has finished.")
        if chosen:
            words = (
                f"{a} {', '.join(f'{k}={show_value(v)}' for k, v in c.items())}" for a, c in chosen.items()
            )
            self.desk.say(f"tuned: {'; '.join(words)}")
        return {
            "grid": {path: list(values) for path, values in self.claim.tune.items()},
            "seeds": list(seeds),
            "runs": len(points) * len(seeds) * len(self.arms),
            "seconds": round(seconds, 1),
            "tried": tried,
            "chosen": {label: chosen.get(label, points[0]) for label in self.labels},
        }

    # -------------------------------------------------------------- judging

    def judge(self, heats: Sequence[Heat]) -> tuple[Verdict, Found, dict[str, Any]]:
        """The verdict, the gap that decides it, and what became of every part of the claim."""
        claim, (first, second) = self.claim, self.labels[:2]
        values = {metric: self.values(heats, metric) for metric in (claim.metric, *claim.keeps, *claim.also)}

        def gap(metric: str, ahead: str = first, behind: str = second, sign: float = 1.0) -> Found:
            both = zip(values[metric][ahead], values[metric][behind], strict=True)
            return Found.of([sign * (a - b) for a, b in both])

        def reported(metric: str) -> dict[str, Any]:
            sides = {label: round(fmean(values[metric][label]), 6) for label in (first, second)}
            return {**gap(metric).to_json(), **sides}

        pairs = [(first, other) for other in self.labels[1:]] if claim.leads else []
        pairs = pairs or list(itertools.pairwise(self.labels))
        gaps = [gap(claim.metric, a, b, self.sign) for a, b in pairs]
        rooms = [self.room(fmean(values[claim.metric][b]), heats) for _, b in pairs]
        ruled = [g.verdict(m, room) for g, m, room in zip(gaps, self.margins, rooms, strict=True)]
        parts = {f"{a} ahead of {b}": verdict for (a, b), verdict in zip(pairs, ruled, strict=True)}
        mark, reached = self._reached(values[claim.metric][first], heats)
        if reached is not None:
            parts["the mark is reached"] = reached.verdict()
        parts |= {f"{metric} is kept": gap(metric).verdict(margin) for metric, margin in claim.keeps.items()}
        facts: dict[str, Any] = {
            "parts": parts,
            "keeps": {
                metric: {"margin": margin, **reported(metric)} for metric, margin in claim.keeps.items()
            },
            "also": {metric: reported(metric) for metric in claim.also},
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

    def values(self, heats: Sequence[Heat], metric: str) -> dict[str, list[float]]:
        """A metric of every arm on every seed; a run that diverged counts as the worst that was seen."""
        found = {label: [self.read(side[label], metric) for _, side in heats] for label in self.labels}
        worst = min if self.sign > 0 or metric != self.claim.metric else max
        least = worst(scored.value for side in found.values() for scored in side)
        return {a: [least if f.diverged else f.value for f in side] for a, side in found.items()}

    def room(self, baseline: float, heats: Sequence[Heat]) -> float | None:
        """How much better than the baseline one can be, where the best is known."""
        world = next(iter(heats[0][1].values())).plan.world()
        rate = world.medium == "text" and self.claim.metric.split("@")[0] in ("success", "area", "pass")
        best = 1.0 if self.claim.best is None and rate else self.claim.best
        return None if best is None else max(0.0, self.sign * (best - baseline))

    def _reached(self, values: Sequence[float], heats: Sequence[Heat]) -> tuple[dict[str, Any], Found | None]:
        """How far the first is beyond what it must reach, where the claim names such a mark."""
        if self.claim.reaches is None:
            return {}, None
        plan = next(iter(heats[0][1].values())).plan
        mark = self.claim.reaches(plan.world(), plan.options.held_out)
        found = Found.of([self.sign * (value - mark) for value in values])
        return {"reaches": {"mark": round(mark, 6), **found.to_json()}}, found

    def records(self, heats: Sequence[Heat]) -> dict[str, Any]:
        """The numbers of every seed, and the curves."""
        values = self.values(heats, self.claim.metric)
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


def grid(tune: Mapping[str, tuple[Any, ...]]) -> Iterator[Point]:
    """Every combination; of no path there is one, which changes nothing."""
    for values in itertools.product(*tune.values()):
        yield dict(zip(tune, values, strict=True))
