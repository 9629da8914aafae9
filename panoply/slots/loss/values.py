"""Losses of critics and reward models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from panoply.batch import Batch, Values
from panoply.parts import Finding, Part, part
from panoply.slots.loss.pairs import either_way


@part(
    "loss",
    equation="½·(V − target)²",
    needs={"value"},
    scores="none",
    bounds={"weight": "above 0", "clip": "above 0"},
)
def squared_value(batch: Batch, *, weight: float | Part = 1.0, clip: float | None = None) -> Values:
    """Regress a critic on the column `target`.

    clip: the value may not profit from moving further than this from what it was when the experience was
    annotated (the column `value`): the larger of the two errors counts (PPO's value clipping).
    """
    value, target = batch.now["value"], batch["target"]
    error = (value - target) ** 2
    stats = {"error": (value.detach() - target).abs(), "value": value.detach()}
    if clip is not None:
        near = batch["value"] + (value - batch["value"]).clamp(-clip, clip)
        error = torch.maximum(error, (near - target) ** 2)
    return error / 2, stats


@part(
    "loss",
    equation="softplus(x) − x/2,  x = target − u",
    needs={"median"},
    scores="none",
    bounds={"weight": "above 0"},
)
def smooth_pinball(batch: Batch, *, weight: float | Part = 0.5) -> Values:
    """Regress a critic's output `median` on the median of `target`: at the least, E[σ(x)] = ½ (arXiv 2604.18578).

    It is the pinball loss ½·|x| with a round corner, whose width is fixed: targets spread over much less than 1 get a
    mean and not a median.
    """
    gap = batch["target"] - batch.now["median"]
    return F.softplus(gap) - gap / 2, {"median_error": gap.detach().abs(), "above_median": (gap > 0).float()}


@part(
    "loss",
    equation="−log σ(r_chosen − r_rejected)",
    unit="pair",
    stream="imitation",
    needs={"judged"},
    scores="none",
    bounds={"weight": "above 0", "centre": "at least 0"},
)
def bradley_terry(batch: Batch, *, weight: float | Part = 1.0, centre: float = 0.0) -> Values:
    """A reward model's likelihood of the preferences (Bradley & Terry 1952; arXiv 2203.02155).

    Where pairs have a `margin`, the chosen answer must lead by that much (arXiv 2307.09288, eq. 2); where they have
    `p`, how likely it is preferred, both orders count by their probability.
    centre: weight of (r_chosen + r_rejected)², which keeps rewards around zero.
    """
    chosen, rejected = batch.pair_rows(batch.now["judged"])
    margin = chosen - rejected
    lead = batch.pairs.tensor("margin").to(margin) if "margin" in batch.pairs else 0.0
    likelihood = either_way(batch, lambda m: -F.logsigmoid(m), margin - lead, -margin - lead)
    value = likelihood + centre * (chosen + rejected) ** 2
    return value, {"margin": margin.detach(), "accuracy": (margin > 0).float()}


def _labels_impossible(held: Any, method: Any) -> list[Finding]:
    data = method.slots()["data"].settings()
    given = ("total",) if data.get("summed") else data.get("names", ())
    missing = [name for name in held.names if name not in given]
    if missing or not held.names:
        labels = ", ".join(given) or "none"
        return [("names", f"the data's labels are {labels} (data.names, or `total` where they are summed)")]
    return []


@part(
    "loss",
    equation=lambda held: f"Σ (f − label)² over {', '.join(held.names)}",
    unit="episode",
    stream="imitation",
    needs=lambda held: frozenset({"judged", *(f"judged:{name}" for name in held.names)}),
    scores="none",
    impossible=_labels_impossible,
    bounds={"weight": "above 0"},
)
def squared_labels(
    batch: Batch, *, weight: float | Part = 1.0, names: tuple[str, ...] = ("success",)
) -> Values:
    """Regress a reward model of several outputs on several labels of each answer, all of which weigh the same.

    names: of the outputs, which are those of the labels (see data.labelled)
    """
    episodes = batch.by("episode")
    errors = {n: batch.now[f"judged:{n}"] - episodes.first(batch[f"label:{n}"]) for n in names}
    return torch.stack([*errors.values()]).square().sum(0), {
        f"error_{name}": error.detach().abs() for name, error in errors.items()
    }
