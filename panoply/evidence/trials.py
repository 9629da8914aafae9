"""Putting claims to the test: tuning both sides alike, pairing by seed, more seeds while undecided."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from panoply import registry
from panoply.checkpoint import write_atomically
from panoply.errors import PanoplyError, unknown
from panoply.evidence import pool, scores
from panoply.evidence.claims import (
    SEEDS,
    TUNING_SEEDS,
    Claim,
    Found,
    Identity,
    Measured,
    Ranks,
    Verdict,
    together,
)
from panoply.evidence.compare import CACHE, Arm, Budget, thin
from panoply.parts import show_value
from panoply.registry import Entry
from panoply.run import versions

STORE = Path("results") / "claims"
Tuned = dict[str, dict[str, Any]]
"""The settings chosen for each arm."""


@dataclass
class Desk:
    """Where and how trials are run."""

    cache: Path = CACHE
    workers: int | None = None
    watch: pool.Watch | None = None
    most: int = SEEDS[-1]
    """The most seeds to go to."""

    def say(self, text: str) -> None:
        (self.watch or pool.Lines()).say(text)


def claimed(
    names: Sequence[str] = (), family: str | None = None, everything: bool = False
) -> list[tuple[Entry, Claim]]:
    """The works named, or of a family, or all, that carry a claim."""
    every = [(e, e.claim) for e in registry.entries() if e.claim is not None]
    if everything:
        return every
    if family is not None:
        found = [(e, c) for e, c in every if e.family == family]
        if not found:
            raise unknown("family with claims", family, {str(e.family) for e, _ in every})
        return found
    chosen = []
    for name in names:
        match = [(e, c) for e, c in every if name in (e.name, e.id)]
        if not match:
            if any(name in (e.name, e.id) for e in registry.entries()):
                raise PanoplyError(
                    f"'{name}' carries no claim. Those that do: {', '.join(e.name for e, _ in every)}."
                )
            raise unknown("method with a claim", name, [e.name for e, _ in every])
        chosen += match[-1:]
    return chosen


def stored(slug: str, store: Path = STORE) -> dict[str, Any] | None:
    """What was measured of a claim, if anything."""
    path = store / f"{slug}.json"
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PanoplyError(f"{path} is not JSON: measure the claim again.") from error
    return found


def store_result(facts: Mapping[str, Any], store: Path = STORE) -> Path:
    """One line a field, so that a change can be read."""
    path = store / f"{facts['id'].split('@')[0]}.json"
    store.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in facts.items()]
    write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def sentence(facts: Mapping[str, Any]) -> str:
    """A result in one line."""
    low, high = facts["interval"]
    return (
        f"{facts['id'].split('@')[0]} {facts['verdict']}: {facts['metric']} {facts['difference']:+.4g} "
        f"(95 % interval {low:+.4g} to {high:+.4g}) over {facts['seeds']} seeds"
    )


def put_to_test(
    entry: Entry, claim: Claim, desk: Desk, known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Measure a claim. `known` is an earlier result, whose tuning and number of seeds are then taken over."""
    facts: dict[str, Any] = {"id": entry.id, "paper": entry.paper, "kind": claim.kind, "says": claim.says}
    begun = time.monotonic()
    if isinstance(claim, Ranks):
        order = tuple(word or entry.name for word in claim.order)
        facts |= _Race(claim, order, desk, known).run()
    else:
        assert isinstance(claim, Measured)
        facts |= _measured(claim, desk, known)
    return {
        **facts,
        "command": f"panoply claim {entry.name}",
        "seconds": round(time.monotonic() - begun, 1),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
    }


def check(
    entry: Entry, claim: Claim, desk: Desk, store: Path = STORE
) -> tuple[bool, dict[str, Any], dict[str, Any]]:
    """Run a claim again, without cached runs, and say whether its stored verdict still stands."""
    known = stored(entry.name, store)
    if known is None:
        raise PanoplyError(
            f"Nothing is stored for {entry.name} yet: measure it with panoply claim {entry.name}."
        )
    desk.cache.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=desk.cache.parent, prefix=".check-") as fresh:
        anew = Desk(Path(fresh), desk.workers, desk.watch, desk.most)
        found = put_to_test(entry, claim, anew, known)
    return found["verdict"] == known["verdict"], known, found


def _rounds(desk: Desk, known: Mapping[str, Any] | None) -> list[int]:
    """How many seeds to decide by, first and when undecided."""
    if known is not None:
        return [int(known["seeds"])]
    return [n for n in SEEDS if n <= desk.most] or [desk.most]


# ------------------------------------------------------------------ comparisons of learning


@dataclass
class _Race:
    claim: Ranks
    order: tuple[str, ...]
    desk: Desk
    known: Mapping[str, Any] | None = None
    spent: float = 0.0
    lost: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arms = [Arm.parse(word) for word in self.order]
        self.budget = Budget.parse(self.claim.budget)
        self.sign = -1.0 if self.claim.lower else 1.0

    def run(self) -> dict[str, Any]:
        claim = self.claim
        tuning = self.known["tuning"] if self.known else self._tune()
        tuned = [arm.but(tuning["chosen"][arm.label]) for arm in self.arms]
        for n in _rounds(self.desk, self.known):
            runs = self._runs(tuned, range(n))
            verdict, facts = self._judge(runs)
            self.desk.say(
                f"{self.order[0]} against {', '.join(self.order[1:])}: {verdict} at {facts['seeds']} seeds, "
                f"{facts['difference']:+.4f} ({facts['interval'][0]:+.4f} to {facts['interval'][1]:+.4f})"
            )
            if verdict != "undecided":
                break
        return {
            "world": claim.world,
            "settings": {k: show_value(v) for k, v in claim.settings.items()},
            "order": {arm.label: arm.spelled() for arm in self.arms},
            "metric": claim.metric,
            "better": "lower" if claim.lower else "higher",
            "budget": {self.budget.unit: self.budget.amount},
            "verdict": verdict,
            **facts,
            "tuning": tuning,
            "failed": self.lost,
        }

    def _orders(self, arms: Sequence[Arm], seeds: Sequence[int]) -> dict[tuple[str, int], pool.Order]:
        asked = tuple(m for m in (self.claim.metric, *self.claim.keeps, *self.claim.also) if scores.asks(m))
        choices = {"settings": dict(self.claim.settings)}
        return {
            (arm.label, seed): pool.Order(
                f"{arm.label} s{seed}", arm.plan(self.claim.world, seed, self.budget, **choices), asked
            )
            for seed in seeds
            for arm in arms
        }

    def _run(self, orders: Sequence[pool.Order]) -> None:
        pool.run_all(orders, self.desk.cache, self.desk.workers, self.desk.watch)
        pool.check_any(orders, f"the claim on {self.order[0]}")
        self.lost |= {o.name: str(o.problem) for o in orders if o.problem is not None}

    def _read(self, order: pool.Order, metric: str) -> scores.Scored:
        found = scores.read(order.folder, metric, self.budget.unit, self.budget.amount)
        if not math.isfinite(found.value):
            raise PanoplyError(f"{metric} of the run {order.name} is {found.value}.")
        return found

    def _tune(self) -> dict[str, Any]:
        """Every arm with every point of the same grid, on seeds of their own; the best mean is chosen."""
        points = list(_grid(self.claim.tune))
        if len(points) == 1:
            return {
                "grid": {},
                "seeds": [],
                "runs": 0,
                "seconds": 0.0,
                "chosen": {a.label: {} for a in self.arms},
            }
        orders = {
            (arm.label, i, seed): order
            for arm in self.arms
            for i, point in enumerate(points)
            for (_, seed), order in self._orders([arm.but(point)], TUNING_SEEDS).items()
        }
        self._run(list(orders.values()))
        tried, chosen, seconds = [], {}, 0.0
        for arm in self.arms:
            means = []
            for i, point in enumerate(points):
                found = [
                    self._read(o, self.claim.metric)
                    for (label, j, _), o in orders.items()
                    if (label, j) == (arm.label, i) and o.problem is None
                ]
                seconds += sum(s.seconds for s in found)
                mean = sum(s.value for s in found) / len(found) if found else -self.sign * math.inf
                means.append(self.sign * mean)
                tried.append(
                    {"method": arm.label, **_words(point), "score": round(mean, 5) if found else None}
                )
            chosen[arm.label] = _words(points[means.index(max(means))])
        self.desk.say(f"tuned: {', '.join(f'{a} {_spelled(c)}' for a, c in chosen.items())}")
        return {
            "grid": {path: [_word(v) for v in values] for path, values in self.claim.tune.items()},
            "seeds": list(TUNING_SEEDS),
            "runs": len(orders),
            "seconds": round(seconds, 1),
            "tried": tried,
            "chosen": chosen,
        }

    def _runs(self, arms: Sequence[Arm], seeds: Sequence[int]) -> list[dict[str, pool.Order]]:
        """For each seed on which all arms have finished their runs."""
        orders = self._orders(arms, seeds)
        self._run(list(orders.values()))
        found = [{arm.label: orders[arm.label, seed] for arm in arms} for seed in seeds]
        self.numbers = list(seeds)
        whole = [
            (s, f) for s, f in zip(seeds, found, strict=True) if all(o.problem is None for o in f.values())
        ]
        if not whole:
            raise PanoplyError(f"No seed of the claim on {self.order[0]} has finished on all sides.")
        self.numbers = [s for s, _ in whole]
        return [f for _, f in whole]

    def _judge(self, runs: Sequence[Mapping[str, pool.Order]]) -> tuple[Verdict, dict[str, Any]]:
        read = [{label: self._read(o, self.claim.metric) for label, o in run.items()} for run in runs]
        pairs = list(itertools.pairwise(arm.label for arm in self.arms))
        gaps = [Found.of([self.sign * (r[a].value - r[b].value) for r in read]) for a, b in pairs]
        first, second = self.arms[0].label, self.arms[1].label
        more = {m: self._gap(runs, m, first, second) for m in (*self.claim.keeps, *self.claim.also)}
        kept = [more[m].verdict(margin) for m, margin in self.claim.keeps.items()]
        verdict = together([*(gap.verdict() for gap in gaps), *kept])
        closest = min(gaps, key=lambda gap: gap.interval[0])
        facts: dict[str, Any] = {
            "difference": round(closest.difference, 6),
            "interval": [round(v, 6) for v in closest.interval],
            "seeds": len(read),
            "runs": [
                {"seed": s, **{label: round(found.value, 6) for label, found in r.items()}}
                for s, r in zip(self.numbers, read, strict=True)
            ],
        }
        for title, names in (("keeps", self.claim.keeps), ("also", self.claim.also)):
            facts[title] = {
                m: {
                    **({"margin": self.claim.keeps[m]} if title == "keeps" else {}),
                    "difference": round(more[m].difference, 6),
                    "interval": [round(v, 6) for v in more[m].interval],
                    **{label: self._middle(runs, m, label) for label in (first, second)},
                }
                for m in names
            }
        facts["seconds_a_run"] = {
            a.label: round(sum(r[a.label].seconds for r in read) / len(read), 2) for a in self.arms
        }
        facts["diverged"] = {a.label: sum(r[a.label].diverged for r in read) for a in self.arms}
        facts["curves"] = {a.label: [thin(r[a.label].curve) for r in read] for a in self.arms}
        return verdict, facts

    def _gap(self, runs: Sequence[Mapping[str, pool.Order]], metric: str, first: str, second: str) -> Found:
        return Found.of(
            [self._read(r[first], metric).value - self._read(r[second], metric).value for r in runs]
        )

    def _middle(self, runs: Sequence[Mapping[str, pool.Order]], metric: str, label: str) -> float:
        from panoply.evidence.statistics import interquartile_mean

        return round(float(interquartile_mean([self._read(r[label], metric).value for r in runs])), 6)


def _grid(tune: Mapping[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*tune.values()):
        yield dict(zip(tune, values, strict=True))


def _word(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bool) else show_value(value)


def _words(point: Mapping[str, Any]) -> dict[str, Any]:
    return {path: _word(value) for path, value in point.items()}


def _spelled(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{path}={show_value(value)}" for path, value in point.items()) or "as it is"


# ------------------------------------------------------------------ what a function measures


def _measured(claim: Measured, desk: Desk, known: Mapping[str, Any] | None) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    differences: list[float] = []
    for n in _rounds(desk, known):
        for seed in range(len(runs), n):
            found = {name: float(value) for name, value in claim.measure(seed).items()}
            runs.append({"seed": seed, **found})
            differences.append(claim.difference(next(iter(found.values()))))
        verdict, gap = _ruled(claim, differences)
        if verdict != "undecided":
            break
    metric = next(name for name in runs[0] if name != "seed")
    return {
        "metric": metric,
        "verdict": verdict,
        "difference": gap.difference,
        "interval": list(gap.interval),
        "seeds": len(runs),
        "runs": runs,
    }


def _ruled(claim: Measured, differences: Sequence[float]) -> tuple[Verdict, Found]:
    """An identity must be one on every seed, and its difference is the largest; the rest goes by the interval."""
    if isinstance(claim, Identity):
        found = [claim.within - d for d in differences]
        return ("holds" if max(found) <= claim.within else "fails"), Found(
            max(found), (min(found), max(found))
        )
    gap = Found.of(differences)
    return gap.verdict(), gap
