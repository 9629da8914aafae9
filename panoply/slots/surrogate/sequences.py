"""Surrogates of whole episodes."""

from __future__ import annotations

from typing import Any, Literal

import torch

from panoply.batch import Batch, Values
from panoply.parts import Part, part
from panoply.slots.surrogate.ratios import _clip_inert, needs_against, ratio_stats


def _equation(held: Any) -> str:
    bounded = f"clip(s, {1 - held.low:g}, {1 + held.high:g})"
    votes = "|y|·" if held.lengths == "weigh" else ""
    if held.advantage == "episode":
        return f"{votes}min(sA, {bounded}·A),  s = exp(mean log ρ)"
    return f"{votes}mean min(s_t·A_t, {bounded[:5]}s_t{bounded[6:]}·A_t),  s_t = sg(exp(mean log ρ))·π/sg(π)"


@part(
    "surrogate",
    equation=_equation,
    unit="episode",
    idle="advantage",
    needs=needs_against,
    inert=_clip_inert,
    bounds={"low": "from 0 to 1", "high": "at least 0", "weight": "above 0"},
)
def sequence_clip(
    batch: Batch,
    *,
    low: float = 3e-4,
    high: float = 4e-4,
    advantage: Literal["episode", "decision"] = "episode",
    lengths: Literal["alike", "weigh"] = "alike",
    against: str = "behaviour",
    weight: float | Part = 1.0,
) -> Values:
    """GSPO (arXiv 2507.18071): one bounded ratio for a whole episode, the geometric mean of its decisions' ratios.

    An episode is inside the bounds or outside as a whole, and all its decisions get the same weight s·A/|y|.
    advantage: `episode` has one advantage (the mean of the column, which is constant there for group credit);
    `decision` lets each decision have its own, with the same gradient where they are equal (GSPO-token).
    lengths: `alike`, an episode has one vote whatever its length; `weigh`, one for each of its decisions (LUSPO, arXiv
    2602.05261), without which long answers learn less from the same reward and answers shrink.
    """
    episodes, A = batch.by("episode"), batch["advantage"]
    log_ratio = batch.log_ratio(against)
    mean = episodes.mean(log_ratio)
    if advantage == "episode":
        A = episodes.mean(A)
        ratio = mean.exp()
    else:
        ratio = (episodes.rows(mean.detach()) + log_ratio - log_ratio.detach()).exp()
    free, bounded = ratio * A, ratio.clamp(1 - low, 1 + high) * A
    value = torch.minimum(free, bounded)
    acted = (free > bounded).detach()
    stats = {
        "clip_high": acted & (ratio > 1 + high),
        "clip_low": acted & (ratio < 1 - low),
        "sequence_ratio_max/max": mean.detach().exp(),
    }
    value = value if advantage == "episode" else episodes.mean(value)
    return value if lengths == "alike" else value * episodes.count, {**ratio_stats(batch, against), **stats}
