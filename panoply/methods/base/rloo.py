"""REINFORCE leave-one-out."""

from __future__ import annotations

from panoply.methods.base.grpo import grpo
from panoply.regimes import OnPolicy
from panoply.registry import method
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import sequence_sum
from panoply.slots.reward.shaping import minus_kl
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import log_likelihood

TINY = {
    "sample.prompts": 16,
    "sample.group": 8,
    "reward.beta": 0.0,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "run.steps": 150,
}

CONTROL = {
    "sample.prompts": 4,
    "sample.group": 8,
    "reward.beta": 0.0,
    "reduce": "token_mean",
    "update.lr": 3e-3,
    "update.clip": 0.5,
    "run.steps": 100,
}


@method("rloo@1", base="grpo", presets={"tiny": TINY, "control": CONTROL})
def rloo() -> OnPolicy:
    """REINFORCE leave-one-out (arXiv 2402.14740; Kool et al. 2019).

    The whole answer is one action: ∇ log π(y)·(R − mean of the other answers' R), with R = r − β·log π/π_ref. The
    baseline never contains the answer it is used on, so the gradient is unbiased; nothing is clipped and nothing is
    divided by a deviation or a length.
    """
    return grpo().but(
        sample=groups(prompts=128, group=4),
        reward=minus_kl(beta=0.05),
        credit=group(baseline="leave_one_out", scale="none"),
        surrogate=log_likelihood(),
        regularise=(),
        reduce=sequence_sum(),
    )
