"""Group Relative Policy Optimization."""

from __future__ import annotations

from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import sequence_mean
from panoply.slots.regularise.terms import kl
from panoply.slots.reward.signals import signal
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import clip
from panoply.slots.update.optimisers import adam

TINY = {
    "sample.group": 8,
    "surrogate.high": 0.28,
    "reduce": "token_mean",
    "regularise.kl": "none",
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "run.steps": 150,
}
"""For models of about a million parameters: a larger step, a wider upper bound, no pull to the start."""

CONTROL = {
    "sample.prompts": 4,
    "sample.group": 8,
    "reduce": "token_mean",
    "regularise.kl": "none",
    "update.lr": 1e-3,
    "update.clip": 0.5,
    "update.epochs": 8,
    "update.minibatches": 4,
    "run.steps": 60,
    "run.evaluate_every": 10,
}
"""Groups of 8 episodes from one start; small networks take large steps, several of them on one batch."""


PUBLISHED: Published = {
    "arXiv 2402.03300, §4.2": {
        "sample.prompts": 16,
        "sample.group": 64,
        "regularise.kl.weight": 0.04,
        "update.lr": 1e-6,
        "update.epochs": 1,
        "update.minibatches": 1,
    },
    "arXiv 2402.03300, eq. 3 and 4": {
        "credit.baseline": "mean",
        "credit.scale": "std",
        "reduce": "sequence_mean",
        "regularise.kl.estimator": "k3",
    },
}
"""16 prompts of 64 answers are the batch of 1,024. ε of the clip is not stated; 0.2 is PPO's."""


@method("grpo@1", presets={"tiny": TINY, "control": CONTROL}, published=PUBLISHED)
def grpo() -> OnPolicy:
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300).

    PPO's bounded ratio without a critic: an answer's advantage is its reward against the other answers to the same
    prompt, in standard deviations. The KL term differentiates k3 and so descends KL(π_ref‖π).
    """
    return OnPolicy(
        sample=groups(prompts=16, group=64),
        reward=signal(),
        credit=group(baseline="mean", scale="std"),
        surrogate=clip(low=0.2, high=0.2),
        regularise=(kl(weight=0.04, estimator="k3"),),
        reduce=sequence_mean(),
        update=adam(lr=1e-6),
    )
