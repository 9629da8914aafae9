"""REINFORCE leave-one-out."""

from __future__ import annotations

from panoply.methods.base.grpo import grpo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import sequence_sum
from panoply.slots.reward.shaping import minus_kl
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import log_likelihood
from panoply.slots.update.optimisers import adam

TINY = {
    "sample.prompts": 16,
    "sample.group": 8,
    "reward.beta": 0.0,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "update.minibatches": 1,
    "run.steps": 150,
}

CONTROL = {
    "sample.prompts": 4,
    "sample.group": 8,
    "reward.beta": 0.0,
    "reduce": "token_mean",
    "update.lr": 3e-3,
    "update.clip": 0.5,
    "update.minibatches": 1,
    "run.steps": 100,
}


PUBLISHED: Published = {
    "arXiv 2402.14740, appendix C": {
        "sample.prompts": 128,
        "sample.group": 4,
        "reward.beta": 0.03,
        "update.lr": 1e-6,
        "update.minibatches": 2,
    },
    "arXiv 2402.14740, §3": {
        "credit.baseline": "leave_one_out",
        "credit.scale": "none",
        "reduce": "sequence_sum",
    },
}


@method("rloo@1", base="grpo", presets={"tiny": TINY, "control": CONTROL}, published=PUBLISHED)
def rloo() -> OnPolicy:
    """REINFORCE leave-one-out (arXiv 2402.14740; Kool et al. 2019).

    The whole answer is one action: ∇ log π(y)·(R − mean of the other answers' R), with R = r − β·log π/π_ref. The
    baseline never contains the answer it is used on, so the gradient is unbiased; nothing is clipped and nothing is
    divided by a deviation or a length. 512 answers are learned from in two updates of 256; what the second sees of
    them is a little old, which the paper takes to be harmless.
    """
    return grpo().but(
        sample=groups(prompts=128, group=4),
        reward=minus_kl(beta=0.03),
        credit=group(baseline="leave_one_out", scale="none"),
        surrogate=log_likelihood(),
        regularise=(),
        reduce=sequence_sum(),
        update=adam(lr=1e-6, minibatches=2),
    )
