"""Regularisers: what pulls back. Each returns a penalty per decision, descended with its `weight`."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from panoply.batch import Batch, Values
from panoply.parts import Finding, Part, part
from panoply.slots.surrogate.ratios import stays_at_one

DIVERGENCE = {"reverse": "KL(π‖π_{of})", "forward": "KL(π_{of}‖π)"}
DESCENDED: dict[str, Literal["reverse", "forward"]] = {"k1": "reverse", "k2": "reverse", "k3": "forward"}
"""Which divergence an estimator's published use as a loss really descends (see `kl`)."""


def estimate(log_ratio: Tensor, estimator: str) -> Tensor:
    """KL(π‖π_ref) from samples of π: k1 = l, k2 = l²/2, k3 = e^{−l} − 1 + l, with l = log π/π_ref (Schulman 2020)."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    return (-log_ratio).exp() - 1 + log_ratio


def descended(held: Any) -> Literal["reverse", "forward"]:
    """The divergence whose gradient `kl` follows."""
    return held.descends or DESCENDED[held.estimator]


def _kl_equation(held: Any) -> str:
    return f"{DIVERGENCE[descended(held)].format(of=held.to[:3])}, shown as {held.estimator}"


def one_update(to: str, method: Any) -> list[str]:
    """Why a pull towards the policy of the step's beginning has no effect, where that is so."""
    why = "its gradient is 0 where the policy has not moved, which one update a step only does afterwards"
    return [f"{why} (raise update.epochs or update.minibatches)"] if stays_at_one(to, method) else []


def _kl_inert(held: Any, method: Any) -> list[Finding]:
    if held.weight == 0:
        return [(name, "the weight of the KL term is 0") for name in ("estimator", "descends", "to")]
    return [
        (n, why) for why in one_update(held.to, method) for n in ("weight", "estimator", "descends", "to")
    ]


def needs_to(held: Any) -> frozenset[str]:
    """What a penalty pulls to: a snapshot's log-probabilities; who acted has recorded its own."""
    return frozenset() if held.to == "behaviour" else frozenset({f"logp@{held.to}"})


def _kl_needs(held: Any) -> frozenset[str]:
    return frozenset() if held.weight == 0 else needs_to(held)


@part("regularise", bounds={"weight": "at least 0"}, equation=_kl_equation, needs=_kl_needs, inert=_kl_inert)
def kl(
    batch: Batch,
    *,
    weight: float | Part = 0.04,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    descends: Literal["reverse", "forward"] | None = None,
    to: str = "reference",
) -> Values:
    """Pull towards a snapshot. The value shown and the gradient followed are two different choices.

    On the policy's own samples, with l = log π/π_ref:
      reverse   gradient l·∇log π            descends KL(π‖π_ref)   (differentiating k2, or k1 put into the reward)
      forward   gradient (1 − e^{−l})·∇log π  descends KL(π_ref‖π)   (differentiating k3, as GRPO publishes it)
    Differentiating k1 itself descends nothing: its gradient is ∇log π, zero in expectation.
    """
    log_ratio = batch.log_ratio(to)
    chosen = descends or DESCENDED[estimator]
    slope = log_ratio if chosen == "reverse" else 1 - (-log_ratio).exp()
    push = slope.detach() * batch.now["logp"]
    value = estimate(log_ratio, estimator).detach()
    return value + push - push.detach(), {f"kl_{to}": value}


@part("regularise", equation="(−entropy)", needs={"entropy"}, bounds={"weight": "at least 0"})
def entropy(batch: Batch, *, weight: float | Part = 0.01) -> Values:
    """Keep the policy random: the penalty is minus the entropy of the whole distribution at each decision."""
    return -batch.now["entropy"], {}


@part("regularise", equation="(log π/π_{to})²", needs=needs_to, bounds={"weight": "above 0"})
def squared_log_ratio(batch: Batch, *, weight: float | Part = 0.1, to: str = "behaviour") -> Values:
    """(log π − log π_old)² of every decision: OPMD as in Kimi k1.5, whose ½ is in the weight."""
    squared = batch.log_ratio(to) ** 2
    return squared, {"squared_log_ratio_mean": squared.detach()}


@part("regularise", equation="−log π", bounds={"weight": "above 0"})
def likelihood(batch: Batch, *, weight: float | Part = 0.1) -> Values:
    """−log π of every decision, right or wrong: the same as a baseline that is lower by the weight (AsymRE)."""
    return -batch.now["logp"], {}
