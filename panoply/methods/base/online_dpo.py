"""DPO on the policy's own answers."""

from __future__ import annotations

from panoply.methods.base.grpo import grpo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.loss.pairs import logistic
from panoply.slots.sample.groups import groups
from panoply.slots.schedule.schedules import constant
from panoply.slots.select.pairs import best_worst
from panoply.slots.surrogate.preferences import preference
from panoply.slots.update.optimisers import adam

TINY = {
    "sample.prompts": 16,
    "sample.group": 8,
    "sample.temperature": 1.0,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "run.steps": 150,
}


PUBLISHED: Published = {
    "arXiv 2402.04792, §4 and appendix": {
        "sample.prompts": 128,
        "sample.group": 2,
        "sample.temperature": 0.9,
        "surrogate.loss.beta": 0.1,
        "update.lr": 5e-7,
        "update.schedule.warmup": 150,
    },
}


@method("online-dpo@1", base="grpo", presets={"tiny": TINY}, published=PUBLISHED)
def online_dpo() -> OnPolicy:
    """Online DPO (OAIF, arXiv 2402.04792).

    DPO's loss, but each step's pairs are the policy's own answers, the best over the worst of a prompt by reward. On
    given pairs DPO learns to tell them apart where the policy never goes; here what is pushed down is what it does say.
    Credit is not used.
    """
    return grpo().but(
        sample=groups(prompts=128, group=2, temperature=0.9),
        select=(best_worst(),),
        surrogate=preference(loss=logistic(beta=0.1)),
        regularise=(),
        update=adam(lr=5e-7, schedule=constant(warmup=150)),
    )
