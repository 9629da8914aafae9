"""Trees of the policy's own episodes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from panoply.costs import Lengths, Tokens
from panoply.effects import findings
from panoply.experience import Experience
from panoply.parts import Finding, Part, part
from panoply.selves import LEARNER, acts, by_whom
from panoply.slots.grow.shapes import levels
from panoply.slots.sample.groups import LIMITS

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

_LEVELS = levels()


def _impossible(held: Any, method: Any, world: Any) -> Iterable[Finding]:
    if held.grow.info.slot != "grow":
        return [("grow", "it does not say where trees branch")]
    return [("grow", reason) for _, reason in findings(held.grow.info.impossible, held.grow, method, world)]


def _cost(held: Any, of: Lengths) -> Tokens:
    sampled, trained = held.grow.info.cost(held.grow, of)
    return held.prompts * sampled, held.prompts * trained


@part(
    "sample",
    equation=lambda held: f"{held.prompts} prompts × trees that {held.grow.equation()}{by_whom(held.by)}",
    needs=lambda held: frozenset({"world:fork"}) | acts(held.by),
    gives={"column:parent", "column:segment"},
    bounds=LIMITS,
    impossible=_impossible,
    cost=_cost,
)
def tree(
    collect: Collector,
    *,
    prompts: int = 32,
    temperature: float = 1.0,
    grow: Part = _LEVELS,
    by: str = LEARNER,
) -> Experience:
    """A tree of episodes for each task: an edge is an episode, and the edges of one node are a group.

    An edge earns what it has earned itself and what the edges below it earn on average, so that its group's mean is the
    value of the node it leaves. `parent` is the edge it follows, `segment` how many there are before it.

    grow   where trees branch, asked again and again until it adds nothing
    by     who acts, the policy that learns or another self of it (`behind:10`)
    """
    with collect.acted_by(by):
        grown = collect.tree(collect.tasks(prompts), temperature)
        while branches := grow(grown):
            grown.extend(branches)
        return grown.experience()
