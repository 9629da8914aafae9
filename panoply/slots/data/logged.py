"""Data that was logged by others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from panoply.experience import Experience
from panoply.parts import Finding, part

if TYPE_CHECKING:
    from panoply.rollout.control import ControlCollector


def _inert(held: Any, method: Any) -> list[Finding]:
    if "sample" in method.slots():
        return []
    return [("alone", "the policy never acts while it learns")]


@part(
    "data",
    equation="the world's logged data",
    needs={"world:data"},
    cost=lambda held, of: (0, 0),
    inert=_inert,
    bounds={"alone": "at least 0"},
)
def logged(collect: ControlCollector, *, alone: int | None = None) -> Experience:
    """All of it (`--world logged:WORLD-MIX`), at every step: batches are the learner's matter.

    alone   steps of the run that learn from it before the policy acts itself, where it does: half of them in a method
            for logged data, none in one that acts anyway, unless said otherwise
    """
    return collect.logged()
