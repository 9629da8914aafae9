"""Surrogates that follow one another in the course of a run."""

from __future__ import annotations

from typing import Any

from panoply.batch import Batch, Values
from panoply.parts import Finding, Part, part
from panoply.slots.surrogate.ratios import clip, log_likelihood

_FIRST, _THEN = log_likelihood(), clip()


def _impossible(held: Any, method: Any) -> list[Finding]:
    for name in ("first", "then"):
        one = getattr(held, name).info
        if one.slot != "surrogate":
            return [(name, f"{one.id} is no surrogate")]
        if one.acts is not None or one.state is not None:
            why = "has phases of its own" if one.acts is not None else "remembers"
            return [(name, f"{one.id} {why}, and so must be the surrogate itself")]
        if one.unit != "decision" or one.stream != "own":
            return [
                (
                    name,
                    f"{one.id} is not of single decisions of the policy's own, as a surrogate in phases is",
                )
            ]
    if held.first == held.then:
        return [("then", "it is the same as first")]
    return []


@part(
    "surrogate",
    equation=lambda held: (
        f"in the first {held.steps} steps {held.first.equation()}; then {held.then.equation()}"
    ),
    acts=lambda held, step: held.first if step < held.steps else held.then,
    impossible=_impossible,
    bounds={"steps": "at least 1"},
)
def in_phases(_batch: Batch, *, first: Part = _FIRST, then: Part = _THEN, steps: int = 30) -> Values:
    """One surrogate in the first steps of a run, and another in the rest. Each has its own needs and metrics.

    steps: how many steps are the first's
    """
    raise AssertionError("first or then acts in its place")
