"""Distribution-Centric Policy Optimization: entropy held at a target by what a hotter policy would have said."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience
from panoply.methods.base.grpo import CONTROL as GRPO_CONTROL
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import episode_returns, group
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import clip
from panoply.slots.update.optimisers import adam

_GROUP = group(epsilon=1e-6)


def _tempered(temperature: float) -> str:
    return f"logp*{temperature:g}@old"


def _needs(held: Any) -> frozenset[str]:
    shaped = {"logp@old", _tempered(held.hot), _tempered(held.cold)} if held.shape else set()
    return frozenset(held.advantage.needs() | shaped)


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.shape and not held.cold < 1 < held.hot:
        return [
            ("hot", f"cold < 1 < hot, and they are {held.cold:g} and {held.hot:g}: both would push one way")
        ]
    return []


def _inert(held: Any, method: Any) -> list[Finding]:
    unused = [] if held.shape else [(name, "shape is false, so ρ is 1") for name in ("hot", "cold")]
    return (
        unused
        if held.most
        else [*unused, *((n, "most is 0, so α is") for n in ("target", "threshold", "of"))]
    )


def _equation(held: Any) -> str:
    ratio = "π_old^T/π_old" if held.shape else "1"
    heat = f",  T = {held.hot:g} if H ≤ {held.target:g} else {held.cold:g}" if held.shape else ""
    mixing = (
        f"α = a/(a + p),  a = min(|{held.target:g} − H|, {held.most:g}),  p = share of R > {held.threshold:g}"
    )
    return f"A = (1 − α)·A₀ + α·1[R > {held.threshold:g}]·{ratio}{heat},  {mixing}"


@part(
    "credit",
    equation=_equation,
    state=lambda: {"entropy": 0.0},
    needs=_needs,
    impossible=_impossible,
    inert=_inert,
    bounds={
        "target": "at least 0",
        "most": "from 0 to 1",
        "threshold": "any number",
        "hot": "above 0",
        "cold": "above 0",
    },
)
def entropy_steered(
    state: dict[str, Any],
    experience: Experience,
    *,
    advantage: Part = _GROUP,
    target: float = 0.25,
    most: float = 0.1,
    threshold: float = 0.05,
    hot: float = 1.2,
    cold: float = 0.8,
    shape: bool = True,
    of: Literal["last", "this"] = "last",
) -> tuple[dict[str, Any], Tensor]:
    """Another credit, and on right episodes a share of what a hotter or colder policy would see (arXiv 2601.12730).

    The share α grows with the distance of H, the mean of −log π over sampled tokens, from its target. Right episodes
    are then praised as if π_old at temperature T had been sampled from: its unlikely tokens more than the others where
    T is above 1. ρ is a number and has no gradient. Divided by p, what is added is on average the same however few
    are right.

    advantage   the credit A₀ that is steered
    target      the entropy to hold, in nats a token
    most        of a, before it is divided by p
    threshold   a return above it is right
    hot, cold   T where the entropy is too low, and where it is too high
    shape       whether the ratio ρ is there; without it right episodes are praised as they are
    of          the batch whose entropy is compared: the last one, 0 before the first, or this one
    """
    plain: Tensor = advantage(experience)
    returns, _ = episode_returns(experience)
    measured = float(-experience["logp"].double().mean())
    entropy = state["entropy"] if of == "last" else measured
    pull = min(abs(target - entropy), most)
    right = returns > threshold
    share = float(right.double().mean())
    alpha = pull / (pull + share) if pull else 0.0
    ratio = torch.ones_like(plain)
    if shape:
        heat = _tempered(hot if entropy <= target else cold)
        ratio = (experience[heat] - experience["logp@old"]).exp().to(plain.dtype)
    praised = experience.by("episode").rows(right) * ratio
    return {"entropy": measured}, (1 - alpha) * plain + alpha * praised


TINY = {
    "credit.target": 0.75,
    "sample.prompts": 16,
    "sample.group": 8,
    "sample.top_p": 1.0,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.weight_decay": 0.0,
    "update.schedule.warmup": 10,
    "update.minibatches": 1,
    "run.steps": 150,
}
"""Small models begin at about 0.8 nats a token, and GRPO's fall below the target here."""
CONTROL = {
    **{k: v for k, v in GRPO_CONTROL.items() if k != "reduce"},
    "sample.top_p": 1.0,
    "update.weight_decay": 0.0,
    "credit.target": 0.5,
}
PUBLISHED: Published = {
    "released code, verl/trainer/ray_trainer.py": {
        "credit.most": 0.1,
        "credit.threshold": 0.05,
        "credit.hot": 1.2,
        "credit.cold": 0.8,
        "credit.shape": True,
        "credit.of": "last",
    },
    "released code, README.md, the table of targets": {"credit.target": 0.25},
    "released code, verl/trainer/core_algos.py": {
        "credit.advantage.baseline": "mean",
        "credit.advantage.scale": "std",
        "credit.advantage.epsilon": 1e-6,
        "reduce": "token_mean",
    },
    "released code, verl/workers/actor/config.py": {
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "surrogate.dual": 3.0,
    },
    "released code, examples/config.yaml and qwen-math-7b-DCPO.sh": {
        "sample.prompts": 512,
        "sample.group": 5,
        "sample.temperature": 1.0,
        "sample.top_p": 0.99,
        "regularise.kl.weight": None,
        "update.lr": 1e-6,
        "update.weight_decay": 0.01,
        "update.clip": 1.0,
        "update.minibatches": 4,
    },
}
"""The target is the best of the authors' table; their script has 0.5. Their answers have up to 2,048 tokens."""


CLAIM = Learns(
    "Where GRPO's entropy falls below 0.75 nats a token, DCPO with that target finds more different right answers in "
    "32 tries, and its success is at most a tenth less.",
    race="coverage",
    metric="distinct@32",
    keeps={"success": 0.1},
    shows=(Shows("entropy", most=0.75),),
    also=("entropy", "pass@32", "area"),
    waives={
        "problems": "pairs has thirteen numbers held out: what differs are the many right answers to each"
    },
)


@method(
    "dcpo@1",
    paper=38,
    base="grpo",
    presets={"tiny": TINY, "control": CONTROL},
    claim=CLAIM,
    published=PUBLISHED,
)
def dcpo() -> OnPolicy:
    """Distribution-Centric Policy Optimization (arXiv 2601.12730): A = (1 − α)·A₀ + α·1[right]·π_old^T/π_old.

    Not Dynamic Clipping Policy Optimization, which has the same letters. An entropy bonus raises whatever is unlikely,
    right or wrong. Here right answers alone get a small praise more, weighted as if they had been sampled at
    temperature 1.2, or at 0.8 where the entropy is above its target: all sampling stays on-policy, and nothing is
    sampled twice. The weight α follows from how far the entropy is from the target.

    H is measured on sampled tokens, as the mean of −log π, and is the last step's; before the first it counts as 0, so
    that one is hot. The authors average it over the mini-batches of the last update; here it is of the policy that
    sampled that step's batch, which is where that update began. Where nothing is right their α is not a number, and
    here it is 1.
    """
    return grpo().but(
        sample=groups(prompts=512, group=5, top_p=0.99),
        credit=entropy_steered(target=0.25),
        surrogate=clip(low=0.2, high=0.2, dual=3.0),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=1e-6, weight_decay=0.01, minibatches=4),
    )
