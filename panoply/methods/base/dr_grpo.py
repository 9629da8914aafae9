"""GRPO done right."""

from __future__ import annotations

from panoply.methods.base.grpo import grpo
from panoply.regimes import OnPolicy
from panoply.registry import method
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import constant
from panoply.slots.sample.groups import groups

TINY = {
    "sample.prompts": 16,
    "surrogate.high": 0.28,
    "reduce.length": 20,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "run.steps": 150,
}


@method("dr-grpo@1", base="grpo", presets={"tiny": TINY})
def dr_grpo() -> OnPolicy:
    """Dr. GRPO (arXiv 2503.20783).

    GRPO without its two biases: A = R − mean(R) is not divided by the group's deviation, which favours prompts that are
    nearly all right or all wrong, and a token weighs 1/L with a fixed L (the longest answer allowed), where 1/|y| makes
    long wrong answers cheap. No KL term.
    """
    return grpo().but(
        sample=groups(prompts=128, group=8),
        credit=group(baseline="mean", scale="none"),
        regularise=(),
        reduce=constant(length=3000),
    )
