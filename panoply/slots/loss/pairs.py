"""Losses on preference pairs: what an episode scores, and what is asked of the two scores of a pair.

A score is ℓ = Σ_t log π/π_to. Without a reference (`to=none`) it is Σ_t log π; with `per_token` it is the mean over the
episode's decisions and not the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.parts import Part, part


def episode_scores(batch: Batch, to: str | None, per_token: bool = False) -> Tensor:
    """ℓ of each episode, in the order of `by("episode")`."""
    episodes, logp = batch.by("episode"), batch.now["logp"]
    wide = logp.to(torch.promote_types(logp.dtype, torch.float32))
    total = episodes.sum(wide) if to is None else batch.episode_log_ratio(to)
    return total / episodes.count if per_token else total


def snapshot_needs(held: Any) -> frozenset[str]:
    """The snapshot that scores are taken against; the behaviour is none, for it may have sampled at a temperature."""
    return frozenset() if held.to is None else frozenset({f"logp@{held.to}"})


def either_way(batch: Batch, loss: Callable[[Tensor], Tensor], margin: Tensor, turned: Tensor) -> Tensor:
    """A pair's loss and that of the pair turned round, by how likely each is: p, and 1 where nothing else is known."""
    if "p" not in batch.pairs:
        return loss(margin)
    p = batch.pairs.tensor("p").to(margin)
    return p * loss(margin) + (1 - p) * loss(turned)


def pair_stats(margin: Tensor, chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    return {
        "margin": margin.detach(),
        "accuracy": (chosen > rejected).float(),
        "chosen_logratio": chosen.detach(),
        "rejected_logratio": rejected.detach(),
    }


def _score_equation(held: Any) -> str:
    ratio = "log π" if held.to is None else f"log π/π_{held.to}"
    return f"ℓ = {'mean' if held.per_token else 'Σ'} {ratio}"


def _logistic_equation(held: Any) -> str:
    gap = f" − {held.gamma:g}" if held.gamma else ""
    return f"−log σ(β·(ℓ_chosen − ℓ_rejected){gap}),  {_score_equation(held)},  β = {held.beta:g}"


@part(
    "loss",
    equation=_logistic_equation,
    unit="pair",
    stream="imitation",
    needs=snapshot_needs,
    bounds={"weight": "above 0", "beta": "above 0", "smoothing": "from 0 up to 0.5", "gamma": "at least 0"},
)
def logistic(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.1,
    smoothing: float = 0.0,
    to: str | None = "reference",
    gamma: float = 0.0,
    per_token: bool = False,
) -> Values:
    """DPO (arXiv 2305.18290): the pair's score difference under a Bradley–Terry likelihood.

    Where pairs have `p`, how likely the first is preferred, both orders count by their probability.
    smoothing: the share of labels taken to be flipped (cDPO).
    gamma: the lead the chosen side must have (SimPO, arXiv 2405.14734).
    """
    chosen, rejected = batch.pair_rows(episode_scores(batch, to, per_token))
    margin = beta * (chosen - rejected) - gamma

    def loss(margin: Tensor) -> Tensor:
        return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)

    return either_way(batch, loss, margin, -margin - 2 * gamma), pair_stats(margin, chosen, rejected)


def preferred_by(batch: Batch, like: Tensor) -> Tensor:
    """2p − 1 of each pair: 1 where an annotator chose, and where it is known how likely they do (`p`), that."""
    if "p" not in batch.pairs:
        return torch.ones_like(like)
    return 2 * batch.pairs.tensor("p").to(like) - 1


def _squared_equation(held: Any) -> str:
    target = 1 / (2 * held.beta)
    return f"(ℓ_chosen − ℓ_rejected − {target:g})²,  {_score_equation(held)}"


@part(
    "loss",
    equation=_squared_equation,
    unit="pair",
    stream="imitation",
    needs=snapshot_needs,
    bounds={"weight": "above 0", "beta": "above 0"},
)
def squared(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.1,
    to: str | None = "reference",
    per_token: bool = False,
) -> Values:
    """IPO (arXiv 2310.12036, eq. 17): regress the score difference on 1/2β, past which a pair pushes back.

    Where pairs say how likely the chosen side is preferred (`p`), the aim is (2p − 1)/2β: what the labels would average
    to, without their noise (arXiv 2403.08635).
    """
    chosen, rejected = batch.pair_rows(episode_scores(batch, to, per_token))
    gap = chosen - rejected
    aim = preferred_by(batch, gap) / (2 * beta)
    return (gap - aim) ** 2, pair_stats(beta * gap, chosen, rejected)


def _hinge_equation(held: Any) -> str:
    return f"max(0, {held.margin:g} − {held.beta:g}·(ℓ_chosen − ℓ_rejected)),  {_score_equation(held)}"


@part(
    "loss",
    equation=_hinge_equation,
    unit="pair",
    stream="imitation",
    needs=snapshot_needs,
    bounds={"weight": "above 0", "beta": "above 0", "margin": "at least 0"},
)
def hinge(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 1.0,
    margin: float = 1.0,
    to: str | None = None,
    per_token: bool = False,
) -> Values:
    """SLiC-HF (arXiv 2305.10425): the chosen side must lead by `margin`; a pair that does has no gradient.

    With `to=reference` and a small beta it is the hinge form of DPO (RSO, arXiv 2309.06657).
    """
    chosen, rejected = batch.pair_rows(episode_scores(batch, to, per_token))
    lead = beta * (chosen - rejected)
    return (margin - lead).relu(), pair_stats(lead, chosen, rejected)


def _flips_equation(held: Any) -> str:
    return (
        f"[{1 - held.flips:g}·f(m) − {held.flips:g}·f(−m)]/{1 - 2 * held.flips:g},  f(m) = −log σ(m),  "
        f"m = {held.beta:g}·(ℓ_chosen − ℓ_rejected),  {_score_equation(held)}"
    )


FLIPS = {"weight": "above 0", "beta": "above 0", "flips": "from 0 up to 0.5"}


@part("loss", equation=_flips_equation, unit="pair", stream="imitation", needs=snapshot_needs, bounds=FLIPS)
def robust(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.1,
    flips: float = 0.1,
    to: str | None = "reference",
    per_token: bool = False,
) -> Values:
    """Robust DPO (arXiv 2403.00409): DPO's loss, unbiased although a share of the labels is flipped.

    Smoothing (cDPO) adds the flipped label's loss; here it is subtracted, so that on average the noise cancels.
    flips: the share of pairs whose two sides are swapped, below a half
    """
    chosen, rejected = batch.pair_rows(episode_scores(batch, to, per_token))
    margin = beta * (chosen - rejected)
    value = (-(1 - flips) * F.logsigmoid(margin) + flips * F.logsigmoid(-margin)) / (1 - 2 * flips)
    return value, pair_stats(margin, chosen, rejected)


def _exact_equation(held: Any) -> str:
    return (
        f"KL(p ‖ [{1 - held.smoothing:g}, {held.smoothing:g}]),  p = softmax({held.beta:g}·[ℓ_chosen, ℓ_rejected]),  "
        f"{_score_equation(held)}"
    )


@part(
    "loss",
    equation=_exact_equation,
    unit="pair",
    stream="imitation",
    needs=snapshot_needs,
    bounds={"weight": "above 0", "beta": "above 0", "smoothing": "from 0.000001 to 0.5"},
)
def reverse_kl(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.1,
    smoothing: float = 1e-3,
    to: str | None = "reference",
    per_token: bool = False,
) -> Values:
    """EXO (arXiv 2402.00856, eq. 16): the reverse KL from the policy's preference to the labels'.

    DPO descends KL(labels ‖ policy), which covers; this one seeks a mode, as reinforcement learning does.
    smoothing: what the rejected side is believed to be worth, above 0 or the divergence is infinite
    """
    chosen, rejected = batch.pair_rows(episode_scores(batch, to, per_token))
    margin = beta * (chosen - rejected)
    won, lost = F.logsigmoid(margin), F.logsigmoid(-margin)
    value = won.exp() * (won - math.log1p(-smoothing)) + lost.exp() * (lost - math.log(smoothing))
    return value, pair_stats(margin, chosen, rejected)


def _discovered_equation(held: Any) -> str:
    return (
        f"(1 − w)·(−log σ(m)) + w·exp(−m),  w = σ(m/{held.tau:g}),  m = {held.beta:g}·(ℓ_chosen − ℓ_rejected),  "
        f"{_score_equation(held)}"
    )


@part(
    "loss",
    equation=_discovered_equation,
    unit="pair",
    stream="imitation",
    needs=snapshot_needs,
    bounds={"weight": "above 0", "beta": "above 0", "tau": "above 0"},
)
def discovered(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.05,
    tau: float = 0.05,
    to: str | None = "reference",
    per_token: bool = False,
) -> Values:
    """DiscoPOP's log-ratio modulated loss (arXiv 2406.08414, eq. 5), which a language model proposed.

    Logistic where the pair is ranked wrong and exponential where it is ranked right; between the two the loss falls and
    rises again, so a pair near m = 0 may be pushed back.
    tau: how wide the step between the two losses is
    """
    chosen, rejected = batch.pair_rows(episode_scores(batch, to, per_token))
    margin = beta * (chosen - rejected)
    share = torch.sigmoid(margin / tau)
    value = -F.logsigmoid(margin) * (1 - share) + torch.exp(-margin) * share
    return value, pair_stats(margin, chosen, rejected)


@part("loss", equation="(−log π(chosen))", unit="pair", stream="imitation", bounds={"weight": "above 0"})
def chosen_nll(batch: Batch, *, weight: float | Part = 1.0, per_token: bool = True) -> Values:
    """Imitate the chosen side: what keeps a pair loss from lowering both sides as long as the gap grows.

    Every pair has one vote: with `per_token` the mean over its chosen decisions, otherwise their sum.
    """
    chosen, _ = batch.pair_rows(episode_scores(batch, None, per_token))
    return -chosen, {"chosen_nll": -chosen.detach()}
