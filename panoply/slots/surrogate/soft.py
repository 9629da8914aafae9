"""Surrogates whose bound is soft: a decision's weight fades as its ratio leaves 1, and never jumps to nothing."""

from __future__ import annotations

from typing import Any

import torch

from panoply.batch import Batch, Values
from panoply.parts import Finding, Part, part
from panoply.slots.surrogate.ratios import STAYS, needs_against, ratio_stats, stays_at_one

POSITIVE = dict.fromkeys(("weight", "positive", "negative"), "above 0")


@part(
    "surrogate",
    equation="4/τ·σ(τ·(ρ − 1))·A,  τ = {positive} if A > 0 else {negative}",
    idle="advantage",
    needs=needs_against,
    bounds=POSITIVE,
)
def soft_gate(
    batch: Batch,
    *,
    positive: float = 1.0,
    negative: float = 1.05,
    against: str = "behaviour",
    weight: float | Part = 1.0,
) -> Values:
    """SAPO (arXiv 2511.20347): a sigmoid in the place of the clip.

    Its slope at ρ = 1 is 1, as the plain ratio's, and falls smoothly on both sides. Decisions with a negative advantage
    fade faster, since raising all other tokens is what makes training unstable.

    positive, negative: the gate's temperature for advantages above 0 and for others; a larger one is a narrower gate
    """
    advantage = batch["advantage"]
    tau = torch.where(advantage > 0, positive, negative)
    gate = torch.sigmoid(tau * (batch.log_ratio(against).exp() - 1)) * 4 / tau
    return gate * advantage, ratio_stats(batch, against)


def _sides(held: Any) -> tuple[tuple[float, float], tuple[float, float]]:
    """k, and λ, for advantages of at least 0 and for others."""
    return (held.k_positive, held.k_negative), (held.lam_positive, held.lam_negative)


def _gamma_equation(held: Any) -> str:
    more, less = (f"{k:g}, {lam:g}" for k, lam in zip(*_sides(held), strict=True))
    sides = f"k, λ = {more} if A ≥ 0 else {less}"
    return f"sg(φ(w))·A·log π,  φ(w) = w^k·e^(λ·(1 − w)),  w = Π ρ,  {sides}"


def _moves(held: Any, method: Any) -> list[Finding]:
    if stays_at_one(held.against, method):
        return [(name, STAYS) for name in ("k_positive", "lam_positive", "k_negative", "lam_negative")]
    return []


LOWEST = -18.420680743952367
"""log 1e-8: the least log-ratio of an episode that is told apart."""


@part(
    "surrogate",
    equation=_gamma_equation,
    idle="advantage",
    needs=lambda held: needs_against(held) | {"whole:episode"},
    inert=_moves,
    bounds={"weight": "above 0"}
    | dict.fromkeys(("k_positive", "lam_positive", "k_negative", "lam_negative"), "at least 0"),
)
def gamma_weight(
    batch: Batch,
    *,
    k_positive: float = 2.0,
    lam_positive: float = 3.0,
    k_negative: float = 3.0,
    lam_negative: float = 2.0,
    against: str = "behaviour",
    weight: float | Part = 1.0,
) -> Values:
    """VESPO (arXiv 2602.10693): every decision of an episode weighs φ(w), w the ratio of the whole episode.

    φ is a Gamma density over its value at 1: neither episodes that became much likelier nor those that became much less
    likely count, without a bound to choose and without a mean over tokens. The weight is not differentiated.

    k_positive, k_negative: how fast the weight falls below w = 1, for advantages of at least 0 and for others
    lam_positive, lam_negative: how fast it falls above
    """
    episodes, advantage = batch.by("episode"), batch["advantage"]
    log_w = episodes.sum(batch.log_ratio(against).detach()).clamp(LOWEST, 20.0)
    k = torch.where(advantage >= 0, k_positive, k_negative)
    lam = torch.where(advantage >= 0, lam_positive, lam_negative).clamp(min=1e-4)
    log_w = episodes.rows(log_w)
    phi = (lam + k * log_w - lam * log_w.exp()).exp()
    stats = {**ratio_stats(batch, against), "episode_weight": phi}
    return phi * advantage * batch.now["logp"], stats
