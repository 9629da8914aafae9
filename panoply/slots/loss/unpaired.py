"""Losses on single episodes that are desirable or not."""

from __future__ import annotations

from typing import Any

import torch

from panoply.batch import Batch, Values
from panoply.parts import Part, part
from panoply.slots.loss.pairs import episode_scores, snapshot_needs


def _baseline(batch: Batch, *, to: str, **settings: Any) -> dict[str, float]:
    """z₀ = max(0, mean ℓ of the mismatched episodes), and how many of all the episodes have a label."""
    label = batch.by("episode").first(batch["label"])
    scores = episode_scores(batch, to)
    wrong = scores[label == 0]
    baseline = float(wrong.detach().mean().clamp(min=0)) if len(wrong) else 0.0
    return {"baseline": baseline, "labelled": float((label != 0).float().mean())}


@part(
    "loss",
    equation="λ·(1 − σ(±β·(ℓ − z₀))),  ℓ = Σ log π/π_{to},  z₀ = max(0, mean ℓ of mismatched),  β = {beta}",
    unit="episode",
    stream="imitation",
    needs=snapshot_needs,
    idle="label",
    prepare=_baseline,
    bounds={"weight": "above 0", "beta": "above 0", "desirable": "at least 0", "undesirable": "at least 0"},
)
def prospect(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.1,
    desirable: float = 1.0,
    undesirable: float = 1.0,
    to: str = "reference",
) -> Values:
    """KTO (arXiv 2402.01306): a gain or a loss against the reference point z₀, which saturates either way.

    The column `label` is +1 (desirable), −1, or 0 for the mismatched episodes from which z₀ is taken and which have no
    loss of their own. The mean is over labelled episodes.
    """
    prepared = batch.prepared["prospect"]
    scores = episode_scores(batch, to)
    label = batch.by("episode").first(batch["label"])
    factor = torch.where(label > 0, desirable, undesirable) * (label != 0)
    gain = torch.sigmoid(beta * label * (scores - prepared["baseline"]))
    stats = {
        "desirable_logratio": scores[label > 0].detach(),
        "undesirable_logratio": scores[label < 0].detach(),
        "reference_point": torch.full_like(scores, prepared["baseline"]).detach(),
    }
    return factor * (1 - gain) / prepared["labelled"], stats
