"""Losses on single episodes that are desirable or not."""

from __future__ import annotations

from typing import Any, Literal

import torch

from panoply.batch import Batch, Values
from panoply.parts import Part, part
from panoply.slots.loss.pairs import episode_scores, snapshot_needs


def _baseline(batch: Batch, *, to: str, point: str, **settings: Any) -> dict[str, float]:
    """z₀ = max(0, mean ℓ of the mismatched episodes), and how many of all the episodes have a label."""
    label = batch.by("episode").first(batch["label"])
    wrong = episode_scores(batch, to)[label == 0]
    known = point == "mismatched" and len(wrong)
    baseline = float(wrong.detach().mean().clamp(min=0)) if known else 0.0
    return {"baseline": baseline, "labelled": float((label != 0).float().mean())}


def _equation(held: Any) -> str:
    point = "z₀ = max(0, mean ℓ of mismatched)" if held.point == "mismatched" else "z₀ = 0"
    return f"λ·(1 − σ(±β·(ℓ − z₀))),  ℓ = Σ log π/π_{held.to},  {point},  β = {held.beta:g}"


@part(
    "loss",
    equation=_equation,
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
    point: Literal["mismatched", "zero"] = "mismatched",
    to: str = "reference",
) -> Values:
    """KTO (arXiv 2402.01306): a gain or a loss against the reference point z₀, which saturates either way.

    The column `label` is +1 (desirable), −1, or 0 for the mismatched episodes from which z₀ is taken and which have no
    loss of their own. The mean is over labelled episodes.
    point: what z₀ is: taken from mismatched episodes, or 0 (APO-zero on single answers, arXiv 2408.06266)
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
