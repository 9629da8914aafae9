"""Likelihoods weighed by the advantage inside of a band of ratios, and left alone outside of it."""

from __future__ import annotations

from typing import Any, Literal

import torch

from panoply.batch import Batch, Values
from panoply.parts import Finding, Part, part
from panoply.slots.surrogate.ratios import STAYS, needs_against, ratio_stats, stays_at_one

Mask = Literal["none", "one_side", "two_side", "ring", "episode"]
MASKS = {
    "none": "",
    "one_side": "1[ρ ≤ {up} if A ≥ 0, ρ ≥ {down} if A ≤ 0]·",
    "two_side": "1[{down} ≤ ρ ≤ {up}]·",
    "ring": "1[{down} ≤ ρ ≤ {up}, or ρ ≤ {far_down} and A ≥ 0, or ρ ≥ {far_up} and A ≤ 0]·",
    "episode": "1[s ≤ {up} if A ≥ 0, s ≥ {down} if A ≤ 0]·",
}
WEIGHED = {"none": "", "ratio": "sg(ρ)·", "advantage": "e^(A/{temperature:g})·"}


def _equation(held: Any) -> str:
    bounds = {
        "down": 1 - held.low,
        "up": 1 + held.high,
        "far_down": 1 - held.far_low,
        "far_up": 1 + held.far_high,
    }
    gate = MASKS[held.mask].format(**{name: f"{value:g}" for name, value in bounds.items()})
    weighed = WEIGHED[held.weigh].format(temperature=held.temperature)
    if held.mask == "episode":
        return gate + weighed.replace("ρ", "s") + "A·log π,  s = exp(mean log ρ) of the episode"
    return gate + weighed + "A·log π"


def _inert(held: Any, method: Any) -> list[Finding]:
    found = []
    if held.mask == "none":
        found += [(name, "nothing is masked (mask=none)") for name in ("low", "high")]
    elif stays_at_one(held.against, method):
        found += [(name, STAYS) for name in ("mask", "low", "high")]
    if held.mask != "ring":
        found += [(name, f"mask={held.mask} has one band") for name in ("far_low", "far_high")]
    if held.weigh != "advantage":
        found.append(("temperature", f"weigh={held.weigh} has none"))
    return found


def _impossible(held: Any, method: Any) -> list[Finding]:
    for near, far in (("low", "far_low"), ("high", "far_high")):
        if held.mask == "ring" and getattr(held, far) < getattr(held, near):
            return [(far, f"the ring begins outside of the band, at {near} or farther")]
    return []


@part(
    "surrogate",
    equation=_equation,
    idle="advantage",
    needs=lambda held: needs_against(held) | ({"whole:episode"} if held.mask == "episode" else frozenset()),
    inert=_inert,
    impossible=_impossible,
    bounds={
        **dict.fromkeys(("low", "far_low"), "above 0 to 1"),
        **dict.fromkeys(("high", "far_high", "temperature", "weight"), "above 0"),
    },
)
def masked_likelihood(
    batch: Batch,
    *,
    mask: Mask = "one_side",
    weigh: Literal["none", "ratio", "advantage"] = "none",
    low: float = 0.2,
    high: float = 0.2,
    far_low: float = 0.6,
    far_high: float = 2.0,
    temperature: float = 1.0,
    against: str = "behaviour",
    weight: float | Part = 1.0,
) -> Values:
    """w·A·log π where the ratio is inside of a band, and nothing elsewhere (arXiv 2509.24203).

    Neither mask nor w is differentiated. Masked decisions still count in what is divided by.

    mask: which ratios learn: all; those not yet too far in the direction A asks for (`one_side`, as PPO's clip); those
          in the band (`two_side`); also those far out that A pulls back (`ring`); or `one_side` of a whole episode by
          the geometric mean of its ratios (`episode`, as GSPO)
    weigh: w is 1, the ratio (of the episode where the mask is), or e^(A/temperature). one_side with the ratio has the
           gradient of PPO's clip
    low, high: how far the band goes below and above 1
    far_low, far_high: how far out the ring begins
    """
    advantage = batch["advantage"]
    ratio = batch.log_ratio(against).detach()
    if mask == "episode":
        episodes = batch.by("episode")
        ratio = episodes.rows(episodes.mean(ratio))
    ratio = ratio.exp()
    up, down = advantage >= 0, advantage <= 0
    inside = (ratio >= 1 - low) & (ratio <= 1 + high)
    if mask == "none":
        inside = torch.ones_like(inside)
    elif mask in ("one_side", "episode"):
        inside = (up & (ratio <= 1 + high)) | (down & (ratio >= 1 - low))
    elif mask == "ring":
        inside = inside | (up & (ratio <= 1 - far_low)) | (down & (ratio >= 1 + far_high))
    w = ratio if weigh == "ratio" else (advantage / temperature).exp() if weigh == "advantage" else 1.0
    out = ~inside & (advantage != 0)
    stats = {"clip_high": out & (ratio > 1), "clip_low": out & (ratio <= 1)}
    return w * advantage * batch.now["logp"] * inside, {**ratio_stats(batch, against), **stats}
