"""What a claim is, and the rule by which it holds, fails, or stays undecided.

A claim restates a paper's central result for a setting that two cores run in minutes. It stands beside its method:

    @method("gigpo@1", base="grpo", claim=Learns("…", over="grpo", world="keydoor", budget="episodes=2560"))

Differences are paired by seed. Their interquartile mean with a 95 % bootstrap interval decides: the claim holds or
fails when the interval lies wholly on that side of zero; otherwise more seeds are run, 5, then 10, then 20, and what
is undecided then stays so. At five seeds such an interval covers about 89 %.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from panoply.evidence import statistics

Verdict = Literal["holds", "fails", "undecided"]
SEEDS = (5, 10, 20)
TUNING_SEEDS = (1001, 1002)
"""Never among those that decide."""
RATES: Mapping[str, tuple[float, ...]] = {"update.lr": (1e-4, 3e-4, 1e-3)}
"""The grid that both sides are tuned over, where a claim names no other."""


@dataclass(frozen=True)
class Found:
    """An interquartile mean of differences with its interval."""

    difference: float
    interval: tuple[float, float]

    @classmethod
    def of(cls, differences: Sequence[float]) -> Found:
        middle = float(statistics.interquartile_mean(differences))
        return cls(middle, statistics.interval(differences))

    def verdict(self, margin: float = 0.0) -> Verdict:
        """Which side of −margin the interval lies on."""
        low, high = self.interval
        return "holds" if low > -margin else "fails" if high < -margin else "undecided"


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Of several conditions: all must hold, and one that fails is enough."""
    if "fails" in verdicts:
        return "fails"
    return "undecided" if "undecided" in verdicts else "holds"


@dataclass(frozen=True)
class Claim:
    """A sentence that can be measured."""

    says: str
    kind: ClassVar[str]


@dataclass(frozen=True)
class Ranks(Claim):
    """Methods in order, best first, by a metric at equal budget. Each must be ahead of the next, or the first of all.

    order      methods with changes, as `panoply compare` reads them, or values; an empty word is the method that
               carries the claim
    metric     as of `panoply compare`; the area under the held-out curve by default
    lower      whether less of it is better
    settings   for all methods, such as options of the world
    leads      whether the first is compared with each of the others, whose order then says nothing
    margins    of each comparison: how much less may still count as no worse (0 where none are given)
    tune       the grid, of paths and values, that each method is tuned over
    keeps      metrics of which the first may lose at most so much against the second
    also       metrics that are reported and decide nothing
    reaches    `(world, held-out starts) → metric`: what is known to be good, which the first must reach as well
    """

    order: tuple[Any, ...]
    world: str
    budget: str
    metric: str = "area"
    lower: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    tune: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: RATES, hash=False)
    keeps: Mapping[str, float] = field(default_factory=dict, hash=False)
    also: tuple[str, ...] = ()
    reaches: Callable[[Any, int], float] | None = field(default=None, hash=False)
    leads: bool = False
    margins: tuple[float, ...] = ()
    kind: ClassVar[str] = "ranks"


class Learns(Ranks):
    """A method learns more than a baseline does at equal budget: a ranking of two."""

    kind: ClassVar[str] = "learns"

    def __init__(self, says: str, *, over: Any, world: str, budget: str, method: Any = "", **more: Any):
        super().__init__(says, (method, over), world, budget, **more)


@dataclass(frozen=True)
class Measured(Claim):
    """Something that a function measures without a run.

    measure   takes a seed and gives named numbers, of which the first decides
    """

    measure: Callable[[int], Mapping[str, float]]

    def difference(self, value: float) -> float:
        """The first number as one that is above zero where the claim is true."""
        raise NotImplementedError


@dataclass(frozen=True)
class Identity(Measured):
    """Two ways to compute the same thing differ by at most `within`, on every seed."""

    within: float = 1e-5
    kind: ClassVar[str] = "identity"

    def difference(self, value: float) -> float:
        return self.within - value


@dataclass(frozen=True)
class Speed(Measured):
    """The measured ratio, slow time over fast time, is above `least`."""

    least: float = 1.0
    kind: ClassVar[str] = "speed"

    def difference(self, value: float) -> float:
        return value - self.least


@dataclass(frozen=True)
class Diagnoses(Measured):
    """A planted fault is flagged and a sound case is not: the measured share of the former less that of the latter."""

    kind: ClassVar[str] = "diagnoses"

    def difference(self, value: float) -> float:
        return value


@dataclass(frozen=True)
class Ahead(Measured):
    """Of two sides that a function measures without a run, such as errors of estimates: by how much one is ahead."""

    kind: ClassVar[str] = "ahead"

    def difference(self, value: float) -> float:
        return value
