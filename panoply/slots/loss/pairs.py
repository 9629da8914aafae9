"""Losses on preference pairs."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from panoply.batch import Batch, Values
from panoply.parts import Part, part


def _needs(held: Any) -> frozenset[str]:
    return frozenset({f"logp@{held.to}"})


@part(
    "loss",
    equation="−log σ(β·(l_chosen − l_rejected)),  l = log π/π_{to},  β = {beta}",
    unit="pair",
    stream="imitation",
    needs=_needs,
)
def logistic(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.1,
    smoothing: float = 0.0,
    to: str = "reference",
) -> Values:
    """DPO (arXiv 2305.18290): the pair's log-ratio difference under a Bradley–Terry likelihood.

    smoothing: the share of labels taken to be flipped (cDPO).
    """
    chosen, rejected = batch.pair_rows(batch.episode_log_ratio(to))
    margin = beta * (chosen - rejected)
    value = -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)
    stats = {
        "margin": margin.detach(),
        "accuracy": (margin > 0).float(),
        "chosen_logratio": chosen.detach(),
        "rejected_logratio": rejected.detach(),
    }
    return value, stats
