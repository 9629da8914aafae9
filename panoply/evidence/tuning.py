"""Tuning: the same grid for all sides, the best value bracketed, chosen on problems that decide nothing.

Every point of the grid is run with two seeds, and the best two with five. Where the best value of a number is at an end
of its grid, the grid goes on there by another step of the same ratio, twice at most. Every side begins with the same
grid and has the same rule, so that a baseline is tuned once for all claims that race against it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from panoply.errors import PanoplyError
from panoply.evidence import pool
from panoply.evidence.scores import Scored
from panoply.parts import show_value

if TYPE_CHECKING:
    from panoply.evidence.arms import Arm
    from panoply.evidence.contest import Contest

Point = dict[str, Any]
"""Settings of a grid."""
Grid = Mapping[str, tuple[Any, ...]]
SEEDS = (1001, 1002, 1003, 1004, 1005)
"""Never among those that decide."""
FIRST, BEST, EXTENSIONS = 2, 2, 2
"""Seeds of every point, how many points go on to all seeds, and how often a grid goes on beyond an end."""


def tune(contest: Contest, arms: Sequence[Arm]) -> dict[str, Any]:
    """What every arm is best with, and all that was tried."""
    tuners = [Tuner(contest, arm) for arm in arms]
    if len(list(points(contest.claim.tune))) == 1:
        return untuned(contest, arms)
    waiting = tuners
    while waiting:
        contest.make([order for t in waiting for order in t.wanted(FIRST, t.points())])
        contest.make([order for t in waiting for order in t.wanted(len(SEEDS), t.finalists())])
        waiting = [t for t in waiting if t.extend()]
    contest.desk.say(f"tuned: {'; '.join(f'{t.arm.label} {spelled(t.best())}' for t in tuners)}")
    return {
        **untuned(contest),
        "seeds": list(SEEDS),
        "runs": sum(len(t.orders) for t in tuners),
        "seconds": round(sum(t.seconds() for t in tuners), 1),
        "tried": [row for t in tuners for row in t.tried()],
        "chosen": {t.arm.label: t.best() for t in tuners},
        "inside": {t.arm.label: t.edge(t.best()) is None for t in tuners},
    }


def untuned(contest: Contest, arms: Sequence[Arm] = ()) -> dict[str, Any]:
    """Of a grid of one point: every arm takes it."""
    claim, (only, *_) = contest.claim, points(contest.claim.tune)
    return {
        "grid": {path: list(values) for path, values in claim.tune.items()},
        "by": claim.tuned_by,
        "fixed": claim.fixed,
        "seeds": [],
        "runs": 0,
        "seconds": 0.0,
        "tried": [],
        "chosen": {arm.label: only for arm in arms},
        "inside": {},
    }


def joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Two tunings of different arms as one."""
    made = dict(first)
    for name in ("runs", "seconds", "tried"):
        made[name] = first[name] + second[name]
    for name in ("chosen", "inside"):
        made[name] = {**second[name], **first[name]}
    return made


class Tuner:
    """One arm: what was run of it so far, and what is next."""

    def __init__(self, contest: Contest, arm: Arm):
        self.contest, self.arm = contest, arm
        self.grid = dict(contest.claim.tune)
        self.extensions = 0
        self.orders: dict[tuple[str, int], pool.Order] = {}
        self.found: dict[tuple[str, int], Scored] = {}

    def points(self) -> list[Point]:
        return list(points(self.grid))

    def wanted(self, seeds: int, of: Sequence[Point]) -> list[Any]:
        """The runs of some points that were not asked for yet."""
        heats = []
        for point in of:
            new = [seed for seed in SEEDS[:seeds] if (spelled(point), seed) not in self.orders]
            made = self.contest.orders([self.arm.but(point)], new, split="validation")
            self.orders |= {(spelled(point), seed): side[self.arm.label] for seed, side in made}
            heats += made
        return heats

    def scores(self, point: Point) -> list[float]:
        """What finished runs came to; one that diverged counts as the worst that was seen."""
        found = self.read()
        worst = min((f.value for f in found.values()), default=math.nan)
        mine = [f for (word, _), f in found.items() if word == spelled(point)]
        return [worst if f.diverged else f.value for f in mine]

    def read(self) -> dict[tuple[str, int], Scored]:
        """Every finished run, by its point and its seed."""
        for key, order in self.orders.items():
            if order.problem is None and key not in self.found:
                self.found[key] = self.contest.read(order, self.contest.claim.tuned_by)
        return self.found

    def ranked(self) -> list[Point]:
        """Points with a finished run, best first; of equals those inside of the grid."""
        means = {spelled(p): fmean(s) for p in self.points() if (s := self.scores(p))}
        if not means:
            raise PanoplyError(f"No run that tunes {self.arm.label} has finished.")
        known = [p for p in self.points() if spelled(p) in means]
        return sorted(known, key=lambda p: (-means[spelled(p)], self.edge(p) is not None))

    def finalists(self) -> list[Point]:
        return self.ranked()[:BEST]

    def best(self) -> Point:
        """The best of those that were run with the most seeds."""
        most = max(len(self.scores(p)) for p in self.ranked())
        return next(p for p in self.ranked() if len(self.scores(p)) == most)

    def edge(self, point: Point) -> tuple[str, bool] | None:
        """A path whose value is at an end of its grid, and whether that is the upper one."""
        for path, values in self.grid.items():
            numbers = len(values) > 1 and all(isinstance(v, int | float) and v > 0 for v in values)
            if numbers and point[path] in (min(values), max(values)):
                return path, point[path] == max(values)
        return None

    def extend(self) -> bool:
        """Let the grid go on where its best value is at an end, if that may still be."""
        found = self.edge(self.best())
        if found is None or self.extensions == EXTENSIONS:
            return False
        path, up = found
        end, inner, *more = sorted(self.grid[path], reverse=up)
        step = (
            end / more[0] * inner if more else end / inner * end
        )  # 1, 3, 10 goes on with 30, and that with 100
        self.grid[path] = (*self.grid[path], float(f"{step:.1g}"))
        self.extensions += 1
        return True

    def seconds(self) -> float:
        return sum(found.seconds for found in self.read().values())

    def tried(self) -> list[dict[str, Any]]:
        rows = []
        for point in self.points():
            found = self.scores(point)
            score = round(fmean(found), 5) if found else None
            rows.append({"method": self.arm.label, **point, "score": score, "seeds": len(found)})
        return rows


def points(grid: Grid) -> Iterator[Point]:
    """Every combination; of no path there is one, which changes nothing."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def spelled(point: Point) -> str:
    return ", ".join(f"{path}={show_value(value)}" for path, value in point.items())
