"""Variational sequence-level soft policy optimization."""

from __future__ import annotations

from panoply.methods.base.gspo import gspo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.reduce.averages import token_mean
from panoply.slots.surrogate.soft import gamma_weight

PUBLISHED: Published = {
    "arXiv 2602.10693, §3.4; TRL 1.16, grpo_config.py": {
        "surrogate.k_positive": 2.0,
        "surrogate.lam_positive": 3.0,
        "surrogate.k_negative": 3.0,
        "surrogate.lam_negative": 2.0,
    },
    "TRL 1.16, grpo_trainer.py": {"reduce": "token_mean"},
}


@method("vespo@1", base="gspo", published=PUBLISHED)
def vespo() -> OnPolicy:
    """VESPO (arXiv 2602.10693): sg(w^k·e^{λ(1 − w)})·A·log π, w the ratio of the whole answer.

    The weight comes from a variational problem: stay near the behaviour, and keep the variance of importance weights
    down. Stale answers, likelier now or less likely, fade out, and unlike GSPO's ratio w is not a mean over tokens.
    """
    return gspo().but(surrogate=gamma_weight(), reduce=token_mean())
