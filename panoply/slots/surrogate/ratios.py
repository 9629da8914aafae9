"""Surrogates: what is ascended, one value per decision."""

from __future__ import annotations

from typing import Any, Literal

import torch

from panoply.batch import Batch, Values
from panoply.parts import Finding, Part, part


def ratio_stats(batch: Batch, against: str) -> dict[str, torch.Tensor]:
    """How far the policy has moved from the one the ratio is taken against."""
    log_ratio = batch.log_ratio(against).detach()
    ratio = log_ratio.exp()
    gap = ratio - 1
    return {
        "ratio_off": (gap.abs() > 0.2).float(),
        "ratio_max/max": ratio,
        "logp_gap": log_ratio.abs(),
        "kl_behaviour": gap - log_ratio,
    }


def needs_against(held: Any) -> frozenset[str]:
    """What a ratio is taken against: a snapshot's log-probabilities; who acted has recorded its own."""
    return frozenset() if held.against == "behaviour" else frozenset({f"logp@{held.against}"})


@part("surrogate", equation="A·log π", idle="advantage", bounds={"weight": "above 0"})
def log_likelihood(batch: Batch, *, weight: float | Part = 1.0) -> Values:
    """A·log π(a|s): REINFORCE (Williams 1992). Right only for decisions the current policy took."""
    return batch["advantage"] * batch.now["logp"], ratio_stats(batch, "behaviour")


@part("surrogate", equation="ρ·A", idle="advantage", needs=needs_against, bounds={"weight": "above 0"})
def ratio(batch: Batch, *, against: str = "behaviour", weight: float | Part = 1.0) -> Values:
    """ρ·A: importance sampling without a bound."""
    return batch.log_ratio(against).exp() * batch["advantage"], ratio_stats(batch, against)


STAYS = "with one epoch and one mini-batch the ratio stays at 1 (raise update.epochs or update.minibatches)"


def stays_at_one(against: str, method: Any) -> bool:
    """Whether the policy is still what a ratio is taken against: `old`, or who acted, if that is the learner."""
    update = method.update.settings()
    moves = update.get("epochs", 1) * update.get("minibatches", 1) > 1
    return not moves and (against == "old" or (against == "behaviour" and method.acts_alone))


def _clip_inert(held: Any, method: Any) -> list[Finding]:
    settings = held.settings()
    if stays_at_one(held.against, method):
        return [(name, STAYS) for name in ("low", "high", "dual", "kind") if name in settings]
    if settings.get("kind", "min") != "min":
        return [("dual", f"kind={held.kind} never falls below dual·A")]
    return []


def _clip_impossible(held: Any, method: Any) -> list[Finding]:
    if held.dual is not None and held.dual <= 1:
        return [("dual", "a floor c·A with c ≤ 1 would lie above what it bounds")]
    return []


def _clip_equation(held: Any) -> str:
    bounded = f"clip(ρ, {1 - held.low:g}, {1 + held.high:g})"
    form = {
        "min": f"min(ρA, {bounded}·A)",
        "mask": f"1[ρ in {bounded[8:-1]}]·ρA",
        "truncate": f"sg({bounded})·A·log π",
    }
    dual = f", at least {held.dual:g}·A where A < 0" if held.dual else ""
    return form[held.kind] + dual


@part(
    "surrogate",
    equation=_clip_equation,
    idle="advantage",
    needs=needs_against,
    inert=_clip_inert,
    impossible=_clip_impossible,
    bounds={"low": "from 0 to 1", "high": "at least 0", "dual": "above 1", "weight": "above 0"},
)
def clip(
    batch: Batch,
    *,
    low: float = 0.2,
    high: float = 0.2,
    kind: Literal["min", "mask", "truncate"] = "min",
    dual: float | None = None,
    against: str = "behaviour",
    weight: float | Part = 1.0,
) -> Values:
    """PPO's bounded ratio (arXiv 1707.06347), with the bounds 1−low and 1+high.

    kind: `min` keeps the pessimistic of the bounded and the free value (no gradient where the ratio has already gone
    too far in the direction A asks for); `mask` drops every decision whose ratio is out of bounds, whatever A's sign;
    `truncate` keeps every decision's gradient and bounds only its weight (CISPO, arXiv 2506.13585).
    dual: floor c·A for A < 0 (dual-clip PPO, arXiv 1912.09729), c > 1.
    """
    advantage, log_ratio = batch["advantage"], batch.log_ratio(against)
    ratio = log_ratio.exp()
    bounded = ratio.detach().clamp(1 - low, 1 + high)
    if kind == "min":
        free, held = ratio * advantage, bounded * advantage
        acted = (free > held).detach()  # then the smaller one is the bound, which has no gradient
        value = torch.where(acted, held, free)
    elif kind == "mask":
        acted = (ratio != bounded).detach()
        value = ratio * advantage * (~acted)
    else:
        acted = (ratio != bounded).detach()
        value = bounded * advantage * batch.now["logp"]
    now = ratio.detach()
    moved = acted if kind == "min" else acted & (advantage != 0)
    stats = {"clip_high": moved & (now > 1 + high), "clip_low": moved & (now < 1 - low)}
    if dual is not None:
        floored = (advantage < 0) & (value < dual * advantage)
        value = torch.where(floored, dual * advantage, value)
        stats["clip_dual"] = floored.detach()
    return value, {**ratio_stats(batch, against), **stats}
