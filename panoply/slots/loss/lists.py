"""Losses on lists of answers to one prompt.

Most are learning to rank, with s = β·Σ log π/π_to as an answer's score and ψ as its worth; `self_normalised` and
`contrastive` take the worth for a reward, and fit the policy that has the most of it under a KL to a prior.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.parts import Finding, Part, part
from panoply.slots.loss.pairs import episode_scores, snapshot_needs

BOUNDS = {"weight": "above 0", "beta": "above 0"}


def listed(batch: Batch, beta: float, to: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """[lists, longest]: scores, worths, and which places there are; the best is first."""
    return _placed(batch, beta * episode_scores(batch, to))


def _placed(batch: Batch, per_episode: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scores = batch.list_rows(per_episode, 0.0)
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


def _pairs_equation(held: Any) -> str:
    gap = "s_i − s_j"
    each = f"−log σ({gap})" if held.kind == "logistic" else f"max(0, 1 − ({gap}))"
    over = "Σ_ψi>ψj " if held.pairs == "all" else "of the best i and the worst j, "
    return f"{over}{each},  {_score(held)}"


@part("loss", equation=_pairs_equation, unit="list", stream="imitation", needs=snapshot_needs, bounds=BOUNDS)
def list_pairs(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.05,
    kind: Literal["logistic", "hinge"] = "logistic",
    pairs: Literal["all", "best_worst"] = "all",
    to: str | None = "reference",
) -> Values:
    """A pair loss on all pairs of a list of unequal worth: DPO's likelihood, or SLiC's hinge.

    pairs: all of them, or the best answer over the worst alone
    """
    scores, worth, there = listed(batch, beta, to)
    gaps = scores[:, :, None] - scores[:, None, :]
    losses = -F.logsigmoid(gaps) if kind == "logistic" else (1 - gaps).relu()
    compared = ordered(worth, there)
    if pairs == "best_worst":
        last = there.sum(1) - 1
        place = torch.arange(scores.shape[1], device=scores.device)
        compared = compared & (place == 0)[None, :, None] & (place[None, :] == last[:, None])[:, None, :]
    return (losses * compared).sum((1, 2)), rank_stats(scores.detach(), worth, there)


def _lambda_equation(held: Any) -> str:
    per = " / ΣΔ" if held.normalise else ""
    return (
        f"−Σ_ψi>ψj Δ_ij·log σ(s_i − s_j){per},  Δ_ij = |2^ψi − 2^ψj|·|1/log(1+τ_i) − 1/log(1+τ_j)|, τ the rank by s,  "
        + _score(held)
    )


@part("loss", equation=_lambda_equation, unit="list", stream="imitation", needs=snapshot_needs, bounds=BOUNDS)
def lambda_rank(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.05,
    normalise: bool = False,
    to: str | None = "reference",
) -> Values:
    """LiPO-λ (arXiv 2402.01878): DPO's loss on all pairs of a list, each by what swapping the two would cost in DCG.

    Ranks τ are by the policy's scores as they are now, 1 the highest, and have no gradient; among equal scores the
    list's own order counts. Answers of equal worth ψ are not compared. A list of two is DPO but for a constant.

    normalise: whether the weights Δ of a list are divided by their sum. Worths between 0 and 1 make them small, and
               lists whose answers are much alike nearly silent
    """
    scores, worth, there = listed(batch, beta, to)
    now = scores.detach().masked_fill(~there, -torch.inf)
    rank = now.argsort(dim=1, descending=True, stable=True).argsort(1) + 1
    discount = 1 / torch.log1p(rank.to(scores.dtype))
    gain = 2**worth
    delta = (gain[:, :, None] - gain[:, None, :]).abs() * (discount[:, :, None] - discount[:, None, :]).abs()
    delta = delta * ordered(worth, there)
    if normalise:
        total = delta.sum((1, 2), keepdim=True)
        delta = delta / torch.where(total > 0, total, 1)
    value = -(delta * F.logsigmoid(scores[:, :, None] - scores[:, None, :])).sum((1, 2))
    return value, rank_stats(scores.detach(), worth, there)


def _softmax_equation(held: Any) -> str:
    wanted = f"softmax(ψ/{held.tau:g})_i" if held.target == "softmax" else "(ψ_i/Σψ)"
    return f"−Σ_i {wanted}·log softmax(s)_i,  {_score(held)}"


@part(
    "loss",
    equation=_softmax_equation,
    unit="list",
    stream="imitation",
    needs=snapshot_needs,
    inert=lambda held, method: (
        [] if held.target == "softmax" else [("tau", "worths are taken as they are (target=shares)")]
    ),
    bounds={**BOUNDS, "tau": "above 0"},
)
def list_softmax(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.05,
    target: Literal["softmax", "shares"] = "softmax",
    tau: float = 1.0,
    to: str | None = "reference",
) -> Values:
    """Softmax cross-entropy, ListNet (Cao et al. 2007): the policy's softmax over a list must be that of the worths ψ.

    target   what is made of the worths: their softmax, or their shares of the sum, to which worths below 0 add nothing.
             A list worth nothing then asks for nothing
    tau      temperature of the softmax: near 0 only the best answer counts
    """
    scores, worth, there = listed(batch, beta, to)
    lowest = torch.finfo(scores.dtype).min
    if target == "softmax":
        wanted = (worth / tau).masked_fill(~there, lowest).softmax(1)
    else:
        positive = worth.clamp(min=0)
        total = positive.sum(1, keepdim=True)
        wanted = positive / torch.where(total > 0, total, 1)
    value = -(wanted * scores.masked_fill(~there, lowest).log_softmax(1)).masked_fill(~there, 0.0).sum(1)
    return value, rank_stats(scores.detach(), worth, there)


def _pointwise_equation(held: Any) -> str:
    each = "(ψ − s)²" if held.kind == "squared" else "−[ψ·log σ(s) + (1 − ψ)·log σ(−s)]"
    return f"Σ_i {each},  {_score(held)}"


@part(
    "loss", equation=_pointwise_equation, unit="list", stream="imitation", needs=snapshot_needs, bounds=BOUNDS
)
def list_pointwise(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.05,
    kind: Literal["sigmoid", "squared"] = "sigmoid",
    to: str | None = "reference",
) -> Values:
    """Each answer's score against its own worth, whatever the others are: a likelihood for worths from 0 to 1, or a
    regression. No score is only relative here, so that all answers may rise, or fall."""
    scores, worth, there = listed(batch, beta, to)
    each = -worth * F.logsigmoid(scores) - (1 - worth) * F.logsigmoid(-scores)
    if kind == "squared":
        each = (worth - scores) ** 2
    return torch.where(there, each, 0.0).sum(1), rank_stats(scores.detach(), worth, there)


# ------------------------------------------------------------------ worths as rewards


def _unwritten(held: Any, method: Any) -> list[Finding]:
    data = method.slots().get("data")
    if isinstance(data, Part) and data.settings().get("whose") == "teacher":
        return [
            (
                "",
                "its weights are of who wrote the answers, and a teacher has no log-probabilities: data.whose=policy",
            )
        ]
    return []


def _normalised_equation(held: Any) -> str:
    alpha = (
        f"softmax(log π_{held.to}/q + r/{held.gamma:g})" if held.target == "posterior" else "1 for the best"
    )
    return f"−Σ_i α_i·log {'b' if held.baseline else 'π'}_i,  α = {alpha}" + (
        ", b = softmax(log π/q)" if held.baseline else ""
    )


@part(
    "loss",
    equation=_normalised_equation,
    unit="list",
    stream="imitation",
    needs=lambda held: snapshot_needs(held) if held.target == "posterior" else frozenset(),
    impossible=_unwritten,
    inert=lambda held, method: (
        []
        if held.target == "posterior"
        else [(name, "the best answer alone is the target (target=best)") for name in ("gamma", "to")]
    ),
    bounds={"weight": "above 0", "gamma": "above 0"},
)
def self_normalised(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    gamma: float = 1.0,
    target: Literal["posterior", "best"] = "posterior",
    baseline: bool = True,
    to: str = "reference",
) -> Values:
    """BRAIn (arXiv 2402.02479): the cross-entropy from a list's posterior weights α to the policy's own weights b.

    q is who wrote the answers (the column `logp`), π_to the prior, and r the worth. α is constant, and estimates
    π_to·exp(r/γ); b is differentiated, and its gradient is −Σ (α − b)·∇log π: the policy's own weights are the
    baseline.

    gamma      temperature of the posterior: near 0 only the best answers count
    target     the posterior, or all weight on the best answer (of two, DPO with β = 1 to who wrote them)
    baseline   without it log π itself is raised by α, as in distributional policy gradient (DPG): the same on average
               where q is the policy, and far noisier
    """
    episodes = batch.by("episode")
    own, wrote = (
        episode_scores(batch, None),
        episodes.sum(batch["logp"].to(episode_scores(batch, None).dtype)),
    )
    scores, worth, there = _placed(batch, own - wrote)
    lowest = torch.finfo(scores.dtype).min
    if target == "posterior":
        prior = batch.list_rows(episodes.sum(batch[f"logp@{to}"].to(own.dtype)) - wrote, 0.0)
        alpha = (prior + worth / gamma).masked_fill(~there, lowest).softmax(1)
    else:
        alpha = (torch.arange(scores.shape[1], device=scores.device) == 0).to(scores.dtype).expand_as(scores)
    said = scores.masked_fill(~there, lowest).log_softmax(1) if baseline else batch.list_rows(own, 0.0)
    value = -(alpha * said).masked_fill(~there, 0.0).sum(1)
    stats = {"effective_answers": 1 / (alpha**2).sum(1), **rank_stats(scores.detach(), worth, there)}
    return value, stats


def _contrastive_equation(held: Any) -> str:
    regularised = f"R = r − β·Σ log π/π_{held.to},  β = {held.beta:g}"
    if held.baseline == "others":
        return f"Σ_i>j (R_i − R_j)² / 2βk(k − 1),  {regularised}"
    less = " − mean(r)" if held.baseline == "rewards" else ""
    return f"−mean_i sg(R_i{less})·log π_i,  {regularised}"


@part(
    "loss",
    equation=_contrastive_equation,
    unit="list",
    stream="imitation",
    needs=snapshot_needs,
    bounds=BOUNDS,
)
def contrastive(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.1,
    baseline: Literal["others", "rewards", "none"] = "others",
    to: str = "reference",
) -> Values:
    """CoPG (arXiv 2406.19185): the regularised rewards R of a list's k answers must be equal, whoever gave them.

    They are where π ∝ π_to·exp(r/β). The gradient is −mean_i (R_i − mean of the others' R)·∇log π_i, which on the
    policy's own answers is RLOO's; the published loss is βk times as large.

    baseline: the others' regularised rewards; or, as policy gradients have it that are wrong off policy, the mean of
              the list's plain `rewards`, or `none`
    """
    scores, worth, there = listed(batch, beta, to)
    regularised, k = worth - scores, there.sum(1)
    if baseline == "others":
        both = there[:, :, None] & there[:, None, :]
        gaps = (regularised[:, :, None] - regularised[:, None, :]) * both
        value = (gaps**2).sum((1, 2)) / (4 * beta * k * (k - 1))
    else:
        less = (worth * there).sum(1, keepdim=True) / k[:, None] if baseline == "rewards" else 0.0
        own = batch.list_rows(episode_scores(batch, None), 0.0)
        value = -((regularised.detach() - less) * own * there).sum(1) / k
    return value, rank_stats(scores.detach(), worth, there)
