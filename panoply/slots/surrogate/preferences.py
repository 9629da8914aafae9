"""Pair losses as what an on-policy method ascends."""

from __future__ import annotations

from typing import Any

from panoply.batch import Batch, Values
from panoply.parts import Finding, Part, part
from panoply.slots.loss.pairs import logistic

_LOGISTIC = logistic()


def own_weight(held: Any, method: Any) -> list[Finding]:
    return [("loss.weight", "the surrogate's own weight is what counts")]


def _impossible(held: Any, method: Any) -> list[Finding]:
    info = held.loss.info
    if info.slot != "loss" or info.unit != "pair" or info.prepare is not None:
        return [("loss", "it is not a loss on pairs alone")]
    return []


@part(
    "surrogate",
    equation=lambda held: f"−({held.loss.equation()})",
    unit="pair",
    scores="policy",
    inert=own_weight,
    impossible=_impossible,
    bounds={"weight": "above 0"},
)
def preference(batch: Batch, *, loss: Part = _LOGISTIC, weight: float | Part = 1.0) -> Values:
    """Descend a pair loss on the policy's own episodes; a `select` part such as `best_worst` forms the pairs."""
    value, stats = loss(batch)
    return -value, stats
