"""Pair losses as what an on-policy method ascends."""

from __future__ import annotations

from typing import Any

from panoply.batch import Batch, Values
from panoply.parts import Finding, Part, part
from panoply.slots.loss.pairs import logistic

_LOGISTIC = logistic()


def _inert(held: Any, method: Any) -> list[Finding]:
    return [("loss.weight", "a surrogate is what the other terms are weighed against")]


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.loss.info.slot != "loss" or held.loss.info.unit != "pair":
        return [("loss", "it is not a loss on pairs")]
    return []


@part(
    "surrogate",
    equation=lambda held: f"−({held.loss.equation()})",
    unit="pair",
    inert=_inert,
    impossible=_impossible,
)
def preference(batch: Batch, *, loss: Part = _LOGISTIC) -> Values:
    """Descend a pair loss on the policy's own episodes; a `select` part such as `best_worst` forms the pairs."""
    value, stats = loss(batch)
    return -value, stats
