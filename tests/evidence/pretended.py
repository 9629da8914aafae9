"""Runs that are only pretended: claims are put to test without training anything."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from panoply.evidence import pool, scores
from panoply.evidence.claims import Learns, Ranks
from panoply.evidence.contest import Desk
from panoply.registry import Entry

ENTRY = Entry("gigpo@1", "method", lambda: None, paper=81)
DESK = Desk(watch=pool.Watch())


class Pretended:
    """Stands in for the pool: every run has the score its plan says, and is counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, score: Callable[[str, Any, int], float]):
        self.ran: list[tuple[str, float, int]] = []
        self.scores: dict[Path, float] = {}
        self.measured: dict[Path, set[str]] = {}

        def run_all(orders: Any, *_: Any) -> None:
            for order in orders:
                seed, rate = order.plan.options.seed, order.plan.method.settings()["update.lr"]
                order.folder = Path(f"{order.name}-{rate}")
                if order.folder not in self.scores:  # else it is in the cache
                    self.ran.append((order.name.rsplit(" ", 1)[0], rate, seed))
                self.measured.setdefault(order.folder, set()).update(order.measures)
                self.scores[order.folder] = score(order.name.rsplit(" ", 1)[0], rate, seed)

        def read(folder: Path, metric: str, unit: str, budget: float) -> scores.Scored:
            assert not scores.asks(metric) or metric in self.measured[folder], f"nobody measured {metric}"
            value = self.scores[folder] if metric != "kept" else 0.0
            return scores.Scored(value, [(0.0, 0.0), (budget, value)], 1.0, False)

        monkeypatch.setattr(pool, "run_all", run_all)
        monkeypatch.setattr(scores, "read", read)


PRETENDED = {"room": "it is pretended"}
CLAIM = Learns(
    "It is better.", over="grpo", world="keydoor", budget="episodes=256", metric="success", waives=PRETENDED
)


def bracket(best: float) -> Callable[[str, Any, int], float]:
    """A score that falls by a tenth with every factor of ten between a rate and the best one."""
    return lambda name, rate, seed: 0.6 - 0.1 * abs(math.log10(rate / best))


def plain(claim: Learns) -> Ranks:
    """The same claim without what it says of learning."""
    return Ranks(**{f.name: getattr(claim, f.name) for f in dataclasses.fields(claim)})
