"""Pairs made of a group's own episodes."""

from __future__ import annotations

import torch

from panoply.experience import Experience, Table
from panoply.parts import part
from panoply.slots.credit.groups import episode_returns


@part("select", equation="the best over the worst of each group", gives={"pairs"})
def best_worst(experience: Experience) -> Experience:
    """Of each group only the episodes of highest and lowest return, as a pair; groups without a difference go.

    Among equals it is the one with the smallest episode number.
    """
    returns, groups = episode_returns(experience)
    episodes = experience.by("episode").keys
    last = torch.iinfo(torch.long).max

    def first_with(extreme: torch.Tensor) -> torch.Tensor:
        """The first episode of each group whose return is the extreme one."""
        return groups.min(torch.where(returns == groups.rows(extreme), episodes, last))

    varied = ~groups.constant(returns)
    chosen = first_with(groups.max(returns))[varied]
    rejected = first_with(groups.min(returns))[varied]
    kept = experience.take(torch.isin(experience["episode"], torch.cat([chosen, rejected])))
    return kept.with_pairs(Table({"chosen": chosen, "rejected": rejected}))
