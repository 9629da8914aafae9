"""REINFORCE++."""

from __future__ import annotations

from panoply.methods.base.grpo import grpo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.returns import return_to_go
from panoply.slots.reduce.averages import token_mean
from panoply.slots.reward.shaping import minus_kl
from panoply.slots.sample.groups import groups
from panoply.slots.update.optimisers import adam

TINY = {
    "reward.beta": 0.0,
    "surrogate.high": 0.28,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "update.minibatches": 1,
    "run.steps": 150,
}


PUBLISHED: Published = {
    "arXiv 2501.03262v1, table of hyper-parameters": {
        "reward.beta": 0.01,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "sample.temperature": 1.0,
        "update.lr": 5e-7,
        "update.minibatches": 2,
    },
    "arXiv 2501.03262, eq. 8 to 10": {
        "credit": "return_to_go",
        "credit.normalise": True,
        "reward": "minus_kl",
    },
}


@method("reinforce++@1", base="grpo", presets={"tiny": TINY}, published=PUBLISHED)
def reinforce_plus_plus() -> OnPolicy:
    """REINFORCE++ (arXiv 2501.03262).

    PPO without a critic and without groups: A_t = r − β·Σ_{s≥t} log π/π_ref, normalised over all decisions of the
    batch. Hard and easy prompts share one baseline, so an answer to a hard prompt looks bad for the prompt's sake; that
    is what one episode a prompt costs.
    """
    return grpo().but(
        sample=groups(prompts=128, group=1),
        reward=minus_kl(beta=0.01),
        credit=return_to_go(gamma=1.0, normalise=True),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=5e-7, minibatches=2),
    )
