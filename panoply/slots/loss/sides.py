"""Losses that judge the two sides of a pair apart, each against the reference."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.parts import Part, part
from panoply.slots.loss.pairs import episode_scores, pair_stats, snapshot_needs

POSITIVE = {"weight": "above 0", "beta": "above 0"}


def _sides(batch: Batch, beta: float, to: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """β·ℓ of the chosen and of the rejected side, and what is measured of them."""
    chosen, rejected = batch.pair_rows(episode_scores(batch, to))
    return beta * chosen, beta * rejected, pair_stats(beta * (chosen - rejected), chosen, rejected)


@part(
    "loss",
    equation="−log σ(r_chosen) − ½·log σ(−r_chosen) − ½·log σ(−r_rejected),  r = {beta}·Σ log π/π_{to}",
    unit="pair",
    stream="imitation",
    needs=snapshot_needs,
    bounds=POSITIVE,
)
def noise_contrast(
    batch: Batch, *, weight: float | Part = 1.0, beta: float = 0.01, to: str = "reference"
) -> Values:
    """NCA (arXiv 2402.05369): noise contrastive estimation, each side told from the reference's own answers.

    DPO may lower both sides as long as the gap grows; here the chosen side's likelihood has an optimum above the
    reference's, r = log 2.
    """
    chosen, rejected, stats = _sides(batch, beta, to)
    both = F.logsigmoid(-chosen) + F.logsigmoid(-rejected)
    return -F.logsigmoid(chosen) - both / 2, stats


def _mean_reward(batch: Batch, *, beta: float, to: str, shift: bool, **settings: Any) -> dict[str, float]:
    """δ: the mean reward of all sides of the mini-batch."""
    chosen, rejected, _ = _sides(batch, beta, to)
    return {"shift": float(torch.cat([chosen, rejected]).mean()) if shift else 0.0}


@part(
    "loss",
    equation=lambda held: (
        f"−log σ(r_chosen{' − δ' if held.shift else ''}) − log σ(−r_rejected{' + δ' if held.shift else ''}),  "
        f"r = {held.beta:g}·Σ log π/π_{held.to}" + (",  δ = mean r" if held.shift else "")
    ),
    unit="pair",
    stream="imitation",
    needs=snapshot_needs,
    bounds=POSITIVE,
    prepare=_mean_reward,
)
def binary(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.1,
    shift: bool = True,
    to: str = "reference",
) -> Values:
    """BCO (arXiv 2404.04656): a classifier of chosen against rejected answers, whose logit is the reward.

    shift: subtract δ, the mean reward of the mini-batch, which makes the bound on the preference loss tight. The paper
           keeps a moving average of it; here it is of the mini-batch at the weights of now
    """
    chosen, rejected, stats = _sides(batch, beta, to)
    shifted = batch.prepared["binary"]["shift"]
    return -F.logsigmoid(chosen - shifted) - F.logsigmoid(shifted - rejected), stats


def _anchored_equation(held: Any) -> str:
    form = {
        "up": "1 − σ(r_chosen) + σ(r_rejected)",
        "down": "σ(r_chosen) + 1 − σ(r_chosen − r_rejected)",
    }[held.chosen]
    return f"{form},  r = {held.beta:g}·Σ log π/π_{held.to}"


@part(
    "loss",
    equation=_anchored_equation,
    unit="pair",
    stream="imitation",
    needs=snapshot_needs,
    bounds=POSITIVE,
)
def anchored(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.1,
    chosen: Literal["up", "down"] = "up",
    to: str = "reference",
) -> Values:
    """Anchored preference optimisation (arXiv 2408.06266): where the two sides go is part of the loss.

    chosen: `up` (APO-zero, eq. 7), if chosen answers are better than the policy's own, which then become likelier;
            `down` (APO-down, eq. 8), if they are worse: both sides fall, and the rejected one further
    """
    won, lost, stats = _sides(batch, beta, to)
    if chosen == "up":
        return 1 - torch.sigmoid(won) + torch.sigmoid(lost), stats
    return torch.sigmoid(won) + 1 - torch.sigmoid(won - lost), stats


@part(
    "loss",
    equation="(ℓ_chosen − 1/2β)² + (ℓ_rejected + 1/2β)²,  ℓ = Σ log π/π_{to},  β = {beta}",
    unit="pair",
    stream="imitation",
    needs=snapshot_needs,
    bounds=POSITIVE,
)
def squared_sides(
    batch: Batch, *, weight: float | Part = 1.0, beta: float = 0.001, to: str = "reference"
) -> Values:
    """SPPO on given pairs (arXiv 2405.00675, eq. 4.7): each side has a score of its own to reach.

    The win rates are 1 and 0. 1/β is the paper's η. TRL calls it `sppo_hard`.
    """
    chosen, rejected = batch.pair_rows(episode_scores(batch, to))
    aim = 1 / (2 * beta)
    return (chosen - aim) ** 2 + (rejected + aim) ** 2, pair_stats(chosen - rejected, chosen, rejected)
