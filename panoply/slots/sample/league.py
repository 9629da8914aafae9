"""Games against frozen selves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from panoply.costs import Lengths, Tokens
from panoply.experience import Experience
from panoply.parts import Finding, Part, part
from panoply.seeds import numpy_rng
from panoply.slots.match.members import pfsp

if TYPE_CHECKING:
    from panoply.rollout.control import ControlCollector


_MATCH = pfsp()


def _two_seats(held: Any, method: Any, world: Any) -> list[Finding]:
    return [] if getattr(world, "seats", 1) == 2 else [("", f"{world.name} is no game of two seats")]


def _cost(held: Any, of: Lengths) -> Tokens:
    played = held.prompts * held.group * of.answer
    return 2 * played, played


@part(
    "sample",
    equation="{prompts} starts × {group} games against {match}, which joins every {every} steps",
    needs={"members"},
    bounds={"prompts": "at least 1", "group": "at least 1", "every": "at least 1", "fade": "from 0 to 1"},
    impossible=_two_seats,
    cost=_cost,
)
def league(
    collect: ControlCollector,
    *,
    prompts: int = 8,
    group: int = 8,
    every: int = 10,
    match: Part = _MATCH,
    fade: float = 0.1,
) -> Experience:
    """Games whose second seat is played by one of the policy's frozen selves. The rows of the first are learned from.

    every   steps after which the policy, as it is then, joins the pool
    match   whom it meets in a step
    fade    how much of what is known about the two is forgotten with every meeting
    """
    pool = collect.members
    if collect.version % every == 0:
        pool.add(collect.version)
    member = match(pool, numpy_rng("match", collect.seed, collect.version))
    with collect.against({1: pool.policy(member)}):
        found = collect.episodes(collect.tasks(prompts), group)
    mine = found.take(found["agent"] == 0)
    earned = mine.by("episode").sum(mine["signal:reward"])
    pool.record(0, member, float((earned.sign() + 1).sum()) / 2, len(earned), fade)
    return mine.with_columns(opponent=torch.full((len(mine),), member))
