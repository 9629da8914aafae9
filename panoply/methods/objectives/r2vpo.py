"""Ratio-Variance Regularized Policy Optimization: a brake on the ratio's variance in the place of a clip."""

from __future__ import annotations

from typing import Any

import torch

from panoply.batch import Batch, Values
from panoply.evidence.claims import Learns, Shows
from panoply.methods.base.grpo import CONTROL as GRPO_CONTROL
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.reduce.averages import token_mean
from panoply.slots.regularise.terms import needs_to
from panoply.slots.replay.episodes import episodes
from panoply.slots.surrogate.ratios import STAYS, ratio, stays_at_one
from panoply.slots.update.optimisers import adam


def _risen(
    state: dict[str, Any], batch: Batch, *, target: float, first: float, rate: float, most: float, to: str
) -> tuple[dict[str, Any], dict[str, float]]:
    """The multiplier of this mini-batch, and the one of the next: dual ascent on what the ratio's variance is now."""
    lam = first if state["lam"] is None else state["lam"]
    gap = batch.log_ratio(to).detach().double().exp() - 1
    variance = float((gap**2).mean()) if len(gap) else target
    return {"lam": min(max(0.0, lam + rate * (variance - target)), most)}, {"lam": lam}


def _equation(held: Any) -> str:
    ascent = f"λ ← λ + {held.rate:g}·(mean (ρ − 1)² − {held.target:g}), from 0 to {held.most:g}"
    return f"λ·(ρ − 1)²,  λ = {held.first:g}" + (f" at first, {ascent}" if held.rate else "")


def _inert(held: Any, method: Any) -> list[Finding]:
    if stays_at_one(held.to, method):
        return [(name, STAYS) for name in ("target", "first", "rate", "most")]
    return [] if held.rate else [(name, "rate is 0, so λ stays as it is") for name in ("target", "most")]


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.rate and held.first > held.most:
        return [("first", f"λ is at most {held.most:g} (most), and would begin above it")]
    return []


@part(
    "regularise",
    equation=_equation,
    needs=needs_to,
    state=lambda: {"lam": None},
    prepare=_risen,
    inert=_inert,
    impossible=_impossible,
    bounds=dict.fromkeys(("target", "first", "rate", "most"), "at least 0"),
)
def ratio_variance(
    batch: Batch,
    *,
    target: float = 0.04,
    first: float = 1.0,
    rate: float = 1.0,
    most: float = 50.0,
    to: str = "behaviour",
) -> Values:
    """λ·(ρ − 1)², with a λ that rises while the ratio's variance is above its target (arXiv 2601.03320).

    Under whoever acted E ρ = 1, so E(ρ − 1)² is the variance; it is not taken about the batch's own mean. Near 1 it is
    twice the KL divergence. λ is the weight, and moves once a mini-batch, after it, by the mean over its decisions at
    the weights before the step; how the mini-batch is split has no say. It is saved with the run.

    target   the variance δ that is allowed; a clip at 1 ± 0.2 allows at most 0.04
    first    λ in the first mini-batch
    rate     how far λ moves for a variance that is off by 1; with 0 it stays, and this is a plain penalty
    most     that λ may become
    to       what the ratio is taken against: who acted, or a snapshot
    """
    squared = (batch.log_ratio(to).exp() - 1) ** 2
    lam = float(batch.prepared["ratio_variance"]["lam"])
    shown = squared.detach()
    return lam * squared, {"ratio_square": shown, "lambda": torch.full_like(shown, lam)}


_BARRED = ("surrogate.high", "reduce", "regularise.kl")
TINY = {
    **{path: value for path, value in GRPO_TINY.items() if path not in _BARRED},
    "sample.prompts": 16,
    "update.minibatches": 4,
}
CONTROL = {path: value for path, value in GRPO_CONTROL.items() if path not in _BARRED}
PUBLISHED: Published = {
    "arXiv 2601.03320 and 2605.26784, abstract": {"surrogate": "ratio", "regularise.kl.weight": None},
}
"""The constraint and how it is kept. δ, λ, its rate and the replay's size could not be read, and are chosen here."""
CLAIM = Learns(
    "With answers of a policy up to twenty steps old at a rate of 1e-3, a brake on the ratio's variance learns more "
    "than GRPO's clip.",
    race="stale",
    method="r2vpo:update.minibatches=1",
    shows=(Shows("mean:ratio_off", least=0.05),),
    also=("success", "mean:entropy", "mean:ratio_off", "mean:ratio_square"),
)


@method(
    "r2vpo@1",
    paper=76,
    base="grpo",
    presets={"tiny": TINY, "control": CONTROL},
    claim=CLAIM,
    published=PUBLISHED,
)
def r2vpo() -> OnPolicy:
    """R²VPO (arXiv 2601.03320 and 2605.26784): ρA − λ(ρ − 1)², λ by dual ascent on E(ρ − 1)² ≤ δ.

    A clip drops what has moved far, whatever it earned. Here a decision weighs ρ·(A − 2λ(ρ − 1)): a brake that grows
    with the distance, and turns into a pull back only beyond ρ = 1 + A/2λ, so that a large advantage may go farther.
    Data of earlier policies, whose ratios are far from 1, is damped and not dropped. What is surprising: the brake is
    not symmetric, as (log ρ)² would be; it holds decisions that become likelier more than those that become less
    likely. Nothing here holds entropy, which is reported with the claim. The authors' numbers for δ and λ could not be
    read, and no code of theirs was found: those here are chosen.
    """
    return grpo().but(
        surrogate=ratio(),
        regularise=(ratio_variance(),),
        reduce=token_mean(),
        update=adam(lr=1e-6, minibatches=4),
    )


@method(
    "r2vpo-replay@1",
    paper=76,
    base="r2vpo",
    presets={"tiny": {**TINY, "replay.size": 512, "replay.batch": 16}},
    claim=Learns(
        "From as many answers, four updates a step on new groups and on as many of the last four steps, under a brake "
        "on the ratio's variance, learn more than GRPO's one update on new groups.",
        race="frontier",
        also=("success", "mean:entropy", "mean:ratio_square", "mean:updates"),
    ),
    published=PUBLISHED,
)
def r2vpo_replay() -> OnPolicy:
    """R²VPO off policy (arXiv 2601.03320): each step learns from its own groups and from as many of the last four.

    Groups come again as they were, each with the log-probabilities of who acted. The older they are, the larger
    (ρ − 1)² and the smaller their weight. Of text alone.
    """
    return r2vpo().but(replay=episodes(size=4096, batch=16, into="own", kept="all"))
