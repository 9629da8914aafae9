"""GRPO done right."""

from __future__ import annotations

from panoply.methods.base.grpo import grpo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import constant
from panoply.slots.sample.groups import groups
from panoply.slots.update.optimisers import adam

TINY = {
    "sample.prompts": 16,
    "surrogate.high": 0.28,
    "reduce.length": 20,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "update.minibatches": 1,
    "run.steps": 150,
}


PUBLISHED: Published = {
    "sail-sg/understand-r1-zero, README.md": {
        "sample.prompts": 128,
        "sample.group": 8,
        "sample.temperature": 1.0,
        "sample.top_p": 1.0,
        "reduce.length": 3000,
        "regularise.kl.weight": None,
        "update.lr": 1e-6,
        "update.epochs": 1,
        "update.minibatches": 8,
    },
    "arXiv 2503.20783, §3.2": {"credit.baseline": "mean", "credit.scale": "none", "reduce": "constant"},
}


@method("dr-grpo@1", base="grpo", presets={"tiny": TINY}, published=PUBLISHED)
def dr_grpo() -> OnPolicy:
    """Dr. GRPO (arXiv 2503.20783).

    GRPO without its two biases: A = R − mean(R) is not divided by the group's deviation, which favours prompts that are
    nearly all right or all wrong, and a token weighs 1/L with a fixed L (the longest answer allowed), where 1/|y| makes
    long wrong answers cheap. No KL term. A step's 1,024 answers are learned from in eight updates.
    """
    return grpo().but(
        sample=groups(prompts=128, group=8),
        credit=group(baseline="mean", scale="none"),
        regularise=(),
        reduce=constant(length=3000),
        update=adam(lr=1e-6, minibatches=8),
    )
