"""Weights for decisions that another policy took than the one whose gradient is followed."""

from __future__ import annotations

from typing import Any

import torch

from panoply.experience import Experience
from panoply.parts import Finding, part


def _impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    surrogate = method.slots().get("surrogate")
    against = None if surrogate is None else surrogate.settings().get("against")
    if against == "old":
        return []
    return [
        (
            "",
            "it weighs by π_old/π_behaviour, so that the surrogate must begin at π_old: surrogate.against=old",
        )
    ]


@part(
    "select",
    equation=lambda held: f"weight = min(π_old/π_behaviour, {held.cap:g})",
    needs={"logp@old"},
    gives={"column:weight"},
    bounds={"cap": "above 0"},
    impossible=_impossible,
)
def truncated(experience: Experience, *, cap: float = 2.0) -> Experience:
    """All decisions, each weighed by how likely it was before the step over how likely when drawn, at most `cap`.

    For batches that were sampled ahead (`--staleness`), or by another engine: the surrogate's ratio begins at 1 before
    the step, and the weight makes up for who acted. With a single update a step that ratio stays 1, and no clip acts:
    nothing then holds a policy back that has moved far from who acted, which a ratio to `behaviour` does. Rows that no
    policy of ours drew have weight 1.

    cap: the largest weight; what is cut off is a bias, without which a few decisions would have all the weight
    """
    weight = (experience["logp@old"] - experience["logp"]).exp().clamp(max=cap)
    weight = torch.where(experience["logp"].isnan(), torch.ones_like(weight), weight)
    if "weight" in experience:
        weight = weight * experience["weight"]
    return experience.with_columns(weight=weight)
