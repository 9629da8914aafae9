"""Claims about learning: all sides tuned alike, paired by seed, more seeds while undecided."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from panoply.errors import PanoplyError
from panoply.evidence import pool, scores
from panoply.evidence.arms import Arm, Budget
from panoply.evidence.claims import SEEDS, TUNING_SEEDS, Found, Ranks, Verdict, together
from panoply.evidence.compare import CACHE, thin
from panoply.evidence.statistics import interquartile_mean
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

    def say(self, text: str) -> None:
        (self.watch or pool.Lines()).say(text)

    def rounds(self, known: Mapping[str, Any] | None) -> list[int]:
        """By how many seeds to decide, first and while undecided; with an earlier result, by as many as it had."""
        if known is not None:
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
            heats = self.heats(tuned, range(n))
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
            "difference": round(gap.difference, 6),
            "interval": [round(low, 6), round(high, 6)],
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
        self.make([heat for of_point in heats for heat in of_point])
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
        """The verdict, the gap that decides it, and what became of what is to be kept or reported."""
        claim, (first, second) = self.claim, self.labels[:2]
        values = {
            metric: {
                label: [self.read(side[label], metric).value for _, side in heats] for label in self.labels
            }
            for metric in (claim.metric, *claim.keeps, *claim.also)
        }

        def gap(metric: str, ahead: str, behind: str, sign: float = 1.0) -> Found:
            both = zip(values[metric][ahead], values[metric][behind], strict=True)
            return Found.of([sign * (a - b) for a, b in both])

        def reported(metric: str) -> dict[str, Any]:
            found = gap(metric, first, second)
            sides = {
                label: round(float(interquartile_mean(values[metric][label])), 6) for label in (first, second)
            }
            ends = [round(v, 6) for v in found.interval]
            return {"difference": round(found.difference, 6), "interval": ends, **sides}

        pairs = [(first, other) for other in self.labels[1:]] if claim.leads else []
        pairs = pairs or list(itertools.pairwise(self.labels))
        gaps = [gap(claim.metric, a, b, self.sign) for a, b in pairs]
        kept = [gap(metric, first, second).verdict(margin) for metric, margin in claim.keeps.items()]
        mark, reached = self._reached(values[claim.metric][first], heats)
        ranked = (g.verdict(margin) for g, margin in zip(gaps, self.margins, strict=True))
        verdict = together([*ranked, *(g.verdict() for g in reached), *kept])
        facts: dict[str, Any] = {
            "keeps": {
                metric: {"margin": margin, **reported(metric)} for metric, margin in claim.keeps.items()
            },
            "also": {metric: reported(metric) for metric in claim.also},
            **mark,
        }
        if len(pairs) > 1:
            facts["gaps"] = [
                {"ahead": a, "behind": b, "margin": m, "difference": round(g.difference, 6)}
                | {"interval": [round(end, 6) for end in g.interval]}
                for (a, b), g, m in zip(pairs, gaps, self.margins, strict=True)
            ]
        margin, weakest = min(zip(self.margins, gaps, strict=True), key=lambda of: of[0] + of[1].interval[0])
        if margin:
            facts["margin"] = margin
        return verdict, weakest, facts

    def _reached(self, values: Sequence[float], heats: Sequence[Heat]) -> tuple[dict[str, Any], list[Found]]:
        """How far the first is beyond what it must reach, where the claim names such a mark."""
        if self.claim.reaches is None:
            return {}, []
        plan = next(iter(heats[0][1].values())).plan
        mark = self.claim.reaches(plan.world(), plan.options.held_out)
        found = Found.of([self.sign * (value - mark) for value in values])
        ends = [round(v, 6) for v in found.interval]
        return {
            "reaches": {"mark": round(mark, 6), "difference": round(found.difference, 6), "interval": ends}
        }, [found]

    def records(self, heats: Sequence[Heat]) -> dict[str, Any]:
        """The numbers of every seed, and the curves."""
        found = [
            (s, {a: self.read(order, self.claim.metric) for a, order in side.items()}) for s, side in heats
        ]
        return {
            "runs": [{"seed": s, **{a: round(f.value, 6) for a, f in side.items()}} for s, side in found],
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
