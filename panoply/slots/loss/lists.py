"""Losses on ranked lists of answers to one prompt: learning to rank, with s = β·Σ log π/π_to as an answer's score."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.parts import Part, part
from panoply.slots.loss.pairs import episode_scores, snapshot_needs

BOUNDS = {"weight": "above 0", "beta": "above 0"}


def listed(batch: Batch, beta: float, to: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """[lists, longest]: scores, worths, and which places there are; the best is first."""
    scores = beta * batch.list_rows(episode_scores(batch, to), 0.0)
    members = batch.lists.ragged("episodes")
    worth = members.padded(batch.lists.ragged("worth").values.to(scores.dtype), 0.0)
    return scores, worth, members.padded(torch.ones_like(members.values), 0).bool()


def ordered(worth: Tensor, there: Tensor) -> Tensor:
    """[lists, i, j]: where i is worth more than j. Equals are not compared."""
    return (worth[:, :, None] > worth[:, None, :]) & there[:, :, None] & there[:, None, :]


def rank_stats(scores: Tensor, worth: Tensor, there: Tensor) -> dict[str, Tensor]:
    """The share of pairs of unequal worth that the scores order right, of each list that has any."""
    pairs = ordered(worth, there)
    right = (pairs & (scores[:, :, None] > scores[:, None, :])).sum((1, 2))
    any_ = pairs.any(2).any(1)
    return {"rank_accuracy": right[any_] / pairs.sum((1, 2))[any_]}


def _score(held: Any) -> str:
    ratio = "log π" if held.to is None else f"log π/π_{held.to}"
    return f"s = {held.beta:g}·Σ {ratio}"


def _mle_equation(held: Any) -> str:
    return f"−Σ_k [s_(k) − log Σ_m≥k exp s_(m)],  {_score(held)}, (k) the k-th best"


@part("loss", equation=_mle_equation, unit="list", stream="imitation", needs=snapshot_needs, bounds=BOUNDS)
def list_mle(
    batch: Batch, *, weight: float | Part = 1.0, beta: float = 0.05, to: str | None = "reference"
) -> Values:
    """ListMLE, or DPO under Plackett–Luce (arXiv 2305.18290, eq. 20): the likelihood of the whole order.

    The best is drawn first by a softmax of the scores, then the best of the rest, and so on. Answers of equal worth are
    in the order they were given, so a list of many equals teaches noise.
    """
    scores, worth, there = listed(batch, beta, to)
    place = torch.arange(scores.shape[1], device=scores.device)
    later = (place[None, :] >= place[:, None])[None] & there[:, None, :]
    lowest = torch.finfo(scores.dtype).min  # and not −∞, whose softmax has no gradient
    rest = scores[:, None, :].expand(later.shape).masked_fill(~later, lowest).logsumexp(2)
    value = torch.where(there, rest - scores, 0.0).sum(1)
    return value, rank_stats(scores.detach(), worth, there)


def _lambda_equation(held: Any) -> str:
    return (
        "−Σ_ψi>ψj Δ_ij·log σ(s_i − s_j),  Δ_ij = |2^ψi − 2^ψj|·|1/log(1+τ_i) − 1/log(1+τ_j)|, τ the rank by s,  "
        + _score(held)
    )


@part("loss", equation=_lambda_equation, unit="list", stream="imitation", needs=snapshot_needs, bounds=BOUNDS)
def lambda_rank(
    batch: Batch, *, weight: float | Part = 1.0, beta: float = 0.05, to: str | None = "reference"
) -> Values:
    """LiPO-λ (arXiv 2402.01878): DPO's loss on all pairs of a list, each by what swapping the two would cost in DCG.

    Ranks τ are by the policy's scores as they are now, 1 the highest, and have no gradient; among equal scores the
    list's own order counts. Answers of equal worth ψ are not compared. A list of two is DPO but for a constant.
    """
    scores, worth, there = listed(batch, beta, to)
    now = scores.detach().masked_fill(~there, -torch.inf)
    rank = now.argsort(dim=1, descending=True, stable=True).argsort(1) + 1
    discount = 1 / torch.log1p(rank.to(scores.dtype))
    gain = 2**worth
    delta = (gain[:, :, None] - gain[:, None, :]).abs() * (discount[:, :, None] - discount[:, None, :]).abs()
    losses = -delta * F.logsigmoid(scores[:, :, None] - scores[:, None, :])
    value = (losses * ordered(worth, there)).sum((1, 2))
    return value, rank_stats(scores.detach(), worth, there)


def _softmax_equation(held: Any) -> str:
    return f"−Σ_i softmax(ψ/{held.tau:g})_i·log softmax(s)_i,  {_score(held)}"


@part(
    "loss",
    equation=_softmax_equation,
    unit="list",
    stream="imitation",
    needs=snapshot_needs,
    bounds={**BOUNDS, "tau": "above 0"},
)
def list_softmax(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.05,
    tau: float = 1.0,
    to: str | None = "reference",
) -> Values:
    """ListNet (Cao et al. 2007): the policy's softmax over a list must be that of the worths ψ.

    tau   temperature of the worths: near 0 only the best answer counts
    """
    scores, worth, there = listed(batch, beta, to)
    lowest = torch.finfo(scores.dtype).min
    wanted = (worth / tau).masked_fill(~there, lowest).softmax(1)
    value = -(wanted * scores.masked_fill(~there, lowest).log_softmax(1)).masked_fill(~there, 0.0).sum(1)
    return value, rank_stats(scores.detach(), worth, there)
