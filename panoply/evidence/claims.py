"""What a claim is, and the rule by which it holds, fails, or stays undecided.

A claim restates a paper's central result for a setting that two cores run in minutes. It stands beside its method:

    @method("gigpo@1", base="grpo", claim=Learns("…", over="grpo", world="keydoor", budget="episodes=2560"))

Differences are paired by seed. The mean difference with an interval by Student's t decides: the claim holds or fails
when the interval lies wholly on that side of zero; otherwise more seeds are run, 5, then 10, then 20, and what is
undecided then stays so. Looking three times finds an effect by chance three times as easily, so each look uses an
interval of 98.02 %: where there is no effect at all, 5 % of claims get a verdict, as a test simulates. What is decided
but fills less than a twentieth of the room there was, between the baseline and the best known, is too small to matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from panoply.errors import PanoplyError, unknown
from panoply.evidence import races, statistics

Verdict = Literal["holds", "fails", "undecided", "too small to matter", "not able to tell"]
NOT_ABLE: Verdict = "not able to tell"
"""The verdict where a gate is not passed: none."""
SEEDS = (5, 10, 20)
MISS = 0.0198
"""How often the interval of one look misses; over three looks at growing data this makes 5 % (Pocock 1977)."""
GATES = ("problems", "room", "property")
"""What is asked before seeds are spent (gates.py)."""
SMALL = 0.05
"""A smaller share of the room than this does not matter."""


@dataclass(frozen=True)
class Found:
    """A mean of differences, the interval that decides, and how likely so large a mean is by chance."""

    difference: float
    interval: tuple[float, float]
    p: float = 1.0

    @classmethod
    def of(cls, differences: Sequence[float]) -> Found:
        mean, half, p = statistics.mean_interval(differences, MISS)
        return cls(mean, (mean - half, mean + half), p)

    def verdict(self, margin: float = 0.0, room: float | None = None) -> Verdict:
        """Which side of −margin the interval lies on, and whether that fills enough of the room, where it is known."""
        low, high = self.interval
        if low <= -margin <= high:
            return "undecided"
        if room is not None and not margin and abs(self.difference) < SMALL * room:
            return "too small to matter"
        return "holds" if low > -margin else "fails"

    def to_json(self) -> dict[str, Any]:
        """Rounded, as results are stored."""
        ends = [round(end, 6) for end in self.interval]
        return {"difference": round(self.difference, 6), "interval": ends, "p": float(f"{self.p:.2g}")}


WORST: tuple[Verdict, ...] = ("fails", "undecided", "too small to matter", "holds")
"""The verdict on a part that decides for the whole, before the next."""


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Of several conditions: all must hold, and one that fails is enough."""
    return next((verdict for verdict in WORST if verdict in verdicts), "holds")


@dataclass(frozen=True)
class Claim:
    """A sentence that can be measured. `reworded` is why it is asked anew, where it was asked differently before."""

    says: str
    reworded: str = field(default="", kw_only=True)
    kind: ClassVar[str]


@dataclass(frozen=True)
class Shows:
    """What of the baseline a method needs to be there: `Shows("degenerate_groups", least=0.3)`."""

    metric: str
    least: float = -math.inf
    most: float = math.inf

    def words(self) -> str:
        bounds = [f"at least {self.least:g}"] if self.least > -math.inf else []
        return " and ".join(bounds + ([f"at most {self.most:g}"] if self.most < math.inf else []))


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
    best       the best value of the metric that is known; of success and its area it is 1
    tuned_by   the metric settings are chosen by, more is better; `area:held_out_greedy` where chance is not to count
    fixed      why nothing is tuned, where `tune` leaves no choice
    shows      what the baseline must show for the claim to be able to tell
    waives     gates that do not apply, and why
    race       the standard race this is, by name
    """

    order: tuple[Any, ...]
    world: str
    budget: str
    metric: str = "area"
    lower: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    tune: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: races.RATES, hash=False)
    keeps: Mapping[str, float] = field(default_factory=dict, hash=False)
    also: tuple[str, ...] = ()
    reaches: Callable[[Any, int], float] | None = field(default=None, hash=False)
    leads: bool = False
    margins: tuple[float, ...] = ()
    best: float | None = None
    tuned_by: str = "area"
    fixed: str = ""
    shows: tuple[Shows, ...] = ()
    waives: Mapping[str, str] = field(default_factory=dict, hash=False)
    race: str = ""
    kind: ClassVar[str] = "ranks"

    def __post_init__(self) -> None:
        choices = math.prod(len(values) for values in self.tune.values())
        if choices == 1 and not self.fixed:
            raise PanoplyError("A claim whose sides are not tuned says why: fixed='…'.")
        if choices > 1 and self.fixed:
            raise PanoplyError("A claim that says why nothing is tuned has a grid of one point: tune={}.")
        for gate in self.waives:
            if gate not in GATES:
                raise unknown("gate", gate, GATES)


class Learns(Ranks):
    """A method learns more than a baseline does at equal budget: a ranking of two.

    Either in a standard race, `race="chain"`, whose baseline is tuned and run once for all claims on it, or against
    `over` in a `world` with a `budget` of the claim's own.
    """

    kind: ClassVar[str] = "learns"

    def __init__(
        self,
        says: str,
        *,
        over: Any = None,
        world: str = "",
        budget: str = "",
        method: Any = "",
        race: str = "",
        **more: Any,
    ):
        if race:
            if over or world or budget or {"settings", "tune"} & more.keys():
                raise PanoplyError(f"The race {race} says over, world, budget, settings and tune by itself.")
            found = races.find(race)
            over, world, budget = found.baseline, found.world, found.budget
            more = {"race": race, "settings": found.settings, "tune": found.tune, **found.more, **more}
        elif not (over and world and budget):
            raise PanoplyError("A claim names a standard race, or over, world and budget.")
        super().__init__(says, (method, over), world, budget, **more)


@dataclass(frozen=True)
class Measured(Claim):
    """Something that a function measures without a run.

    measure   takes a seed and gives named numbers, of which the first decides
    """

    measure: Callable[[int], Mapping[str, float]]
    at_once: ClassVar[bool] = False
    """Whether several seeds may be measured at a time: not where time is measured as well."""

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

    at_once: ClassVar[bool] = True
    kind: ClassVar[str] = "diagnoses"

    def difference(self, value: float) -> float:
        return value


@dataclass(frozen=True)
class Ahead(Measured):
    """Of two sides that a function measures without a run, such as errors of estimates: by how much one is ahead."""

    at_once: ClassVar[bool] = True
    kind: ClassVar[str] = "ahead"

    def difference(self, value: float) -> float:
        return value
