"""Balanced Policy Optimization with adaptive clipping."""

from __future__ import annotations

from itertools import takewhile
from typing import Any, Literal

import torch

from panoply.batch import Batch, Values
from panoply.evidence.claims import Learns, Shows
from panoply.methods.base.grpo import CONTROL as GRPO_CONTROL
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.groups import groups
from panoply.slots.schedule.schedules import constant
from panoply.slots.surrogate.ratios import STAYS, clip, needs_against, stays_at_one
from panoply.slots.update.optimisers import adam

STILL = 1e-4
"""Ratios nearer to 1 than this have not moved: no bound reaches them, and none is searched."""
Range = tuple[float, float]


def _places(between: Range, step: float) -> list[float]:
    """Where a bound may stand: from the first number in steps to the second, which is always the last."""
    first, last = between
    inside = takewhile(lambda place: place < last - 1e-9, (first + i * step for i in range(10**6)))
    return [*inside, last]


def _searched(
    batch: Batch,
    *,
    target: float,
    share: str,
    low: Range,
    high: Range,
    step: float,
    first: str,
    against: str,
    **_: Any,
) -> dict[str, float]:
    """The first bounds under which positive advantages have their share, or the last ones there are."""
    q, advantage = batch.log_ratio(against).detach().double().exp(), batch["advantage"].double()
    still = not len(q) or float((q - 1).abs().max()) < STILL
    lows, highs = ([low[0]], [high[0]]) if still else (list(low), _places(high, step))
    up, down = advantage.clamp(min=0), (-advantage).clamp(min=0)
    negative = torch.stack([(q.clamp(min=place) * down).sum() for place in lows]).tolist()
    positive = torch.stack([(q.clamp(max=place) * up).sum() for place in highs]).tolist()
    if first == "high":
        path = [*((0, j) for j in range(len(highs))), (len(lows) - 1, len(highs) - 1)]
    else:
        path = [(0, 0), *((len(lows) - 1, j) for j in range(len(highs)))]

    def met(place: tuple[int, int]) -> bool:
        minus, plus = negative[place[0]], positive[place[1]]
        return bool(plus >= target * (minus + (plus if share == "of_all" else 0.0)))

    i, j = next((place for place in path if met(place)), path[-1])
    whole = positive[j] + negative[i]
    return {"low": lows[i], "high": highs[j], "share": positive[j] / whole if whole else 1.0}


def _equation(held: Any) -> str:
    lows, highs = (f"{a:g}…{b:g}" for a, b in (held.low, held.high))
    wanted = "S⁺/(S⁺ + S⁻)" if held.share == "of_all" else "S⁺/S⁻"
    dual = f", at least {held.dual:g}·A where A < 0" if held.dual else ""
    return f"min(ρA, clip(ρ, l, h)·A){dual},  l in {lows}, h in {highs}: the first with {wanted} ≥ {held.target:g}"


SEARCH = ("target", "share", "low", "high", "step", "first")


def _inert(held: Any, method: Any) -> list[Finding]:
    if stays_at_one(held.against, method):
        return [(name, STAYS) for name in (*SEARCH, "dual")]
    still = [name for name in ("low", "high") if getattr(held, name)[0] == getattr(held, name)[1]]
    found = [("step", "high is one number, and does not move")] if "high" in still else []
    return found + ([("first", f"{still[0]} is one number, and does not move")] if still else [])


def _impossible(held: Any, method: Any) -> list[Finding]:
    for name in ("low", "high"):
        between = getattr(held, name)
        if between[0] > between[1]:
            return [(name, "a bound moves from one number to another that is not smaller, as in 0.6,0.9")]
    if held.low[1] > 1:
        return [("low", "a lower bound on the ratio is at most 1")]
    if held.high[0] < 1:
        return [
            (
                "high",
                "an upper bound on the ratio is at least 1: it is the ratio itself, and not what is above 1",
            )
        ]
    if held.share == "of_all" and held.target >= 1:
        return [
            ("target", "a share of all is below 1 (share=over_negative compares with the negative alone)")
        ]
    if held.dual is not None and held.dual <= 1:
        return [("dual", "a floor c·A with c ≤ 1 would lie above what it bounds")]
    return []


@part(
    "surrogate",
    equation=_equation,
    idle="advantage",
    needs=needs_against,
    prepare=_searched,
    inert=_inert,
    impossible=_impossible,
    bounds={
        **dict.fromkeys(("target", "low", "high", "step", "weight"), "above 0"),
        "dual": "above 1",
    },
)
def balanced_clip(
    batch: Batch,
    *,
    target: float = 0.5,
    share: Literal["of_all", "over_negative"] = "of_all",
    low: Range = (0.6, 0.9),
    high: Range = (1.2, 3.0),
    step: float = 0.05,
    first: Literal["high", "low"] = "high",
    dual: float | None = 3.0,
    against: str = "behaviour",
    weight: float | Part = 1.0,
) -> Values:
    """PPO's bounded ratio whose bounds are looked for anew in every mini-batch (arXiv 2510.18927).

    S⁺ = Σ min(ρ, h)·A over A > 0, S⁻ = Σ max(ρ, l)·|A| over A < 0, both over the whole mini-batch. The bounds begin at
    the first numbers of `low` and `high` and go up, one after the other, until S⁺ has its share. Raising h lets right
    tokens grow on that were unlikely; raising l lets go of wrong tokens that have become unlikely already. A token
    that was let go still weighs l·|A| in S⁻, so raising l never adds to the share: none of the places between its ends
    is ever the first that will do, and l has no step. It stands at its second number once it has to move at all.

    target: the share that positive advantages must have
    share: of what: of S⁺ + S⁻, or, as in the released code, against S⁻ alone (0.5 is then a third of all)
    low, high: from where to where a bound moves; ratios themselves, not distances from 1
    step: by how much the upper one moves at a time
    first: which bound moves first, and the other only when it has come to its end (the released code: `low`)
    dual: floor c·A for A < 0, c > 1
    """
    found = batch.prepared["balanced_clip"]
    bounded = clip(low=1 - found["low"], high=found["high"] - 1, dual=dual, against=against)
    value, stats = bounded(batch)
    searched = {"bound_low": found["low"], "bound_high": found["high"], "positive_share": found["share"]}
    return value, {**stats, **{name: torch.full_like(value.detach(), at) for name, at in searched.items()}}


TINY = {
    **{
        path: value
        for path, value in GRPO_TINY.items()
        if path not in ("surrogate.high", "reduce", "regularise.kl")
    },
    "sample.prompts": 16,
    "update.epochs": 2,
    "update.minibatches": 4,
    "update.weight_decay": 0.0,
}
CONTROL = {
    **{path: value for path, value in GRPO_CONTROL.items() if path not in ("reduce", "regularise.kl")},
    "update.schedule.warmup": 0,
    "update.weight_decay": 0.0,
}
PUBLISHED: Published = {
    "released code, README.md (the paper's numbers)": {
        "surrogate.target": 0.5,
        "surrogate.low": (0.6, 0.9),
        "surrogate.high": (1.2, 3.0),
        "surrogate.share": "of_all",
    },
    "released code, recipe/bapo/run_bapo_example.sh": {
        "sample.prompts": 256,
        "sample.group": 16,
        "sample.temperature": 1.0,
        "update.lr": 1e-6,
        "update.weight_decay": 0.1,
        "update.schedule.warmup": 0.1,
        "update.epochs": 2,
        "update.minibatches": 4,
        "regularise.kl.weight": None,
    },
    "released code, recipe/bapo/policy_loss.py": {"surrogate.dual": 3.0, "reduce": "token_mean"},
    "the paper, from memory": {
        "surrogate.first": "high",
        "surrogate.step": 0.05,
    },
}
"""The script itself searches low .8 to .95 by .05 and then high 1.2 to 2 by .1, with S⁺/S⁻ ≥ .5."""

CLAIM = Learns(
    "With answers of a policy up to twenty steps old at a rate of 1e-3, bounds that are searched for balance learn "
    "more than GRPO's fixed ones.",
    race="stale",
    method="bapo:update.epochs=1:update.minibatches=1",
    shows=(Shows("mean:ratio_off", least=0.05),),
    also=("success", "mean:entropy", "mean:ratio_off"),
)


@method(
    "bapo@1",
    paper=119,
    base="grpo",
    presets={"tiny": TINY, "control": CONTROL},
    claim=CLAIM,
    published=PUBLISHED,
)
def bapo() -> OnPolicy:
    """Balanced Policy Optimization with adaptive clipping (arXiv 2510.18927), for data of earlier policies.

    Most answers to hard prompts are wrong, so negative advantages dominate the gradient, and a fixed bound lets go of
    unlikely right tokens first, which are those that would raise entropy. Here the bounds are looked for in every
    mini-batch: they go up until positive advantages make at least half of the surrogate. What is surprising: nothing is
    weighed anew, only what the clip lets go of changes; where all ratios are 1 bounds have no effect and are not
    searched. Where the paper and its released code differ in the share, the paper is followed, and the code's way is
    `surrogate.share=over_negative` with `first=low`; which bound moves first and the step are from memory.
    """
    return grpo().but(
        sample=groups(prompts=256, group=16),
        credit=group(baseline="mean", scale="std", epsilon=1e-6),
        surrogate=balanced_clip(),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=1e-6, weight_decay=0.1, epochs=2, minibatches=4, schedule=constant(warmup=0.1)),
    )
