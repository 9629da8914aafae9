"""Sampling until there is something to compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from panoply.costs import Lengths, Tokens, own_episodes
from panoply.experience import Experience, Segments
from panoply.parts import part
from panoply.selves import LEARNER, acts, by_whom
from panoply.slots.sample.groups import LIMITS, greedy_cuts, greedy_groups

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


def _cost(held: Any, of: Lengths) -> Tokens:
    sampled, trained = own_episodes(held, of)
    return sampled * held.rounds, trained


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} prompts × {held.group} episodes at temperature {held.temperature:g} whose {held.name} varies, "
        f"in at most {held.rounds} rounds{by_whom(held.by)}"
    ),
    needs=lambda held: frozenset({"world:verify", f"signal:{held.name}"}) | acts(held.by),
    bounds={**LIMITS, "rounds": "at least 1"},
    impossible=greedy_groups,
    inert=greedy_cuts,
    cost=_cost,
)
def dynamic(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    max_tokens: int | None = None,
    rounds: int = 10,
    name: str = "success",
    by: str = LEARNER,
) -> Experience:
    """Dynamic sampling (DAPO, arXiv 2503.14476): ask again until enough groups are neither all right nor all wrong.

    Each round asks `prompts` more tasks; groups whose signal is the same in every episode are dropped, as are those
    beyond `prompts`. After `rounds` rounds it goes on with what there is; if no group varies at all, with the last
    round as it is. The metric `groups_asked` says what a step has cost.

    by: who acts, the policy that learns or another self of it (`behind:10`)
    """
    kept: list[Experience] = []
    enough = 0
    for _ in range(rounds):
        with collect.acted_by(by):
            found = collect.episodes(
                collect.tasks(prompts),
                group,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                max_tokens=max_tokens,
            )
        varied = varied_groups_of(found, name)[: prompts - enough]
        enough += len(varied)
        if len(varied):
            kept.append(found.take(torch.isin(found["group"], varied)))
        if enough == prompts:
            break
    return Experience.cat(kept) if kept else found


def varied_groups_of(experience: Experience, name: str) -> torch.Tensor:
    """The keys of the groups whose episodes differ in a signal."""
    episodes = experience.by("episode")
    groups = Segments(episodes.first(experience["group"]))
    return groups.keys[~groups.constant(episodes.sum(experience[f"signal:{name}"]))]
