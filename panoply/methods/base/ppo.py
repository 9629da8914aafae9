"""Proximal Policy Optimization."""

from __future__ import annotations

from panoply.regimes import OnPolicy
from panoply.registry import method
from panoply.slots.credit.gae import gae
from panoply.slots.loss.values import squared_value
from panoply.slots.model.values import critic
from panoply.slots.reduce.averages import token_mean
from panoply.slots.reward.signals import signal
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import clip
from panoply.slots.update.optimisers import adam

TINY = {
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.epochs": 1,
    "update.minibatches": 2,
    "models.critic.update.lr": 1e-3,
    "models.critic.update.minibatches": 4,
    "run.steps": 200,
}


@method("ppo@1", presets={"tiny": TINY})
def ppo() -> OnPolicy:
    """Proximal Policy Optimization (arXiv 1707.06347) with a token critic and GAE.

    Several epochs on one batch, the ratio bounded to 1 ± 0.2, each decision credited by how much better things went
    than the critic expected. Value clipping and a critic warm-up are settings of `models.critic`.
    """
    return OnPolicy(
        sample=groups(prompts=128, group=1),
        reward=signal(),
        credit=gae(gamma=1.0, lam=0.95),
        surrogate=clip(low=0.2, high=0.2),
        reduce=token_mean(),
        update=adam(lr=1e-6, epochs=4, minibatches=4),
        models=(critic(loss=squared_value(clip=0.2), update=adam(lr=1e-5, epochs=4, minibatches=4)),),
    )
