"""Clipped importance-sampling weights."""

from __future__ import annotations

from panoply.methods.base.grpo import grpo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.reduce.averages import token_mean
from panoply.slots.surrogate.ratios import clip
from panoply.slots.update.optimisers import adam

TINY = {
    "sample.group": 8,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "update.minibatches": 2,
    "run.steps": 150,
}


PUBLISHED: Published = {
    "arXiv 2506.13585, §3.1": {
        "surrogate.low": 1.0,
        "surrogate.kind": "truncate",
        "regularise.kl.weight": None,
        "reduce": "token_mean",
        "update.minibatches": 16,
    },
    "arXiv 2510.13786 (ScaleRL)": {"surrogate.high": 4.0},
}


@method("cispo@1", base="grpo", presets={"tiny": TINY}, published=PUBLISHED)
def cispo() -> OnPolicy:
    """CISPO (MiniMax-M1, arXiv 2506.13585).

    The ratio is bounded as a weight and not as a gate: sg(min(ρ, 1 + ε))·A·log π. A token that has already moved far,
    often the rare one where reasoning turns, keeps its gradient, which PPO's clip takes away. There is no lower bound
    (`low=1`) and no KL term; the upper one was not published, and 5 is what ScaleRL (arXiv 2510.13786) found best.
    """
    return grpo().but(
        surrogate=clip(low=1.0, high=4.0, kind="truncate"),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=1e-6, minibatches=16),
    )
