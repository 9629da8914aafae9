"""Hints: the same problems with the beginning of their reference answer already in the prompt.

What is given stands in the prompt, so it is no decision and has no loss. Held-out problems come from the world itself:
no part of a method is asked when one is evaluated, and no evaluation has hints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from panoply.experience import Experience
from panoply.parts import Finding, part
from panoply.slots.sample.groups import LIMITS, greedy_groups

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task, TextWorld

DRAWN = {name: LIMITS[name] for name in ("prompts", "group", "temperature", "max_tokens")}
"""Limits of what all parts of this kind are told about sampling."""
SHARE = "from 0 up to 1"
"""Of a hint: the whole answer would leave nothing to be said."""


def steps_of(world: TextWorld, task: Task) -> int:
    """Steps of a task's reference answer, hinted or not."""
    whole = len(task.given) + len(world.gold(task)) - 1
    return max(1, round(whole / world.step_tokens))


def shown(world: TextWorld, task: Task) -> float:
    """The share of the reference answer's steps that a task's prompt shows."""
    return len(task.given) / world.step_tokens / steps_of(world, task)


def further(world: TextWorld, tasks: Sequence[Task], share: float) -> list[Task | None]:
    """Each task with a hint of that share; None where, in whole steps, that is no more than it shows already."""
    hinted = [world.hint(task, share) for task in tasks]
    return [new if len(new.given) > len(old.given) else None for old, new in zip(tasks, hinted, strict=True)]


def _equation(held: Any) -> str:
    falls = "" if held.until is None else f"·max(0, 1 − step/{held.until})"
    return f"{held.prompts} prompts × {held.group} episodes, {held.share:g}{falls} of the answer given"


def _impossible(held: Any, method: Any) -> list[Finding]:
    found = greedy_groups(held, method)
    return found or ([("share", "no hint is given: take sample=groups")] if held.share == 0 else [])


@part(
    "sample",
    equation=_equation,
    needs={"world:hint"},
    bounds={**DRAWN, "share": SHARE, "until": "at least 1"},
    impossible=_impossible,
)
def hinted(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    max_tokens: int | None = None,
    share: float = 0.5,
    until: int | None = None,
) -> Experience:
    """Groups on problems that all have a hint, whether they need it or not: what methods of hints are compared with.

    share: of the reference answer that is given, in whole steps
    until: the step at which the share, falling in a line, has come to nothing; none: it stays
    """
    left = share if until is None else share * max(0.0, 1 - collect.version / until)
    tasks = [collect.world.hint(task, left) for task in collect.tasks(prompts)]
    collect.notes = {"hint_share": sum(shown(collect.world, task) for task in tasks) / len(tasks)}
    return collect.episodes(tasks, group, temperature=temperature, max_tokens=max_tokens)
