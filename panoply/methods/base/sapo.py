"""Soft Adaptive Policy Optimization."""

from __future__ import annotations

from panoply.methods.base.gspo import gspo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.surrogate.soft import soft_gate

PUBLISHED: Published = {
    "arXiv 2511.20347; TRL 1.16, grpo_config.py": {
        "surrogate.positive": 1.0,
        "surrogate.negative": 1.05,
        "reduce": "sequence_mean",
        "credit.scale": "std",
    },
}


@method("sapo@1", base="gspo", published=PUBLISHED)
def sapo() -> OnPolicy:
    """Soft Adaptive Policy Optimization (arXiv 2511.20347).

    4/τ·σ(τ·(ρ − 1))·A in the place of a clip: a token's weight fades smoothly as its ratio leaves 1, so that single
    off-policy tokens are damped without a whole answer being dropped (GSPO) or a gradient cut off (GRPO). Negative
    advantages get the larger τ, since they push all other tokens up.
    """
    return gspo().but(surrogate=soft_gate(positive=1.0, negative=1.05))
