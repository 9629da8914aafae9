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

CONTROL = {
    "sample": "rollout",
    "sample.envs": 1,
    "sample.length": 2048,
    "credit.gamma": 0.99,
    "update.lr": 3e-4,
    "update.epsilon": 1e-5,
    "update.clip": 0.5,
    "update.epochs": 10,
    "update.minibatches": 32,
    "models.critic.update": None,
    "models.critic.loss.weight": 1.0,
    "models.critic.loss.clip": None,
    "run.steps": 500,
    "run.evaluate_every": 10,
}
"""Stable-Baselines3's defaults: policy and critic learn together (½·error² with weight 1 is its 0.5·error²)."""
CARTPOLE = {
    **CONTROL,
    "sample.envs": 8,
    "sample.length": 32,
    "credit.gamma": 0.98,
    "credit.lam": 0.8,
    "update.lr": 1e-3,
    "update.schedule": "linear",
    "update.epochs": 20,
    "update.minibatches": 1,
    "run.steps": 400,
    "run.evaluate_every": 25,
}
"""RL Baselines3 Zoo's numbers for CartPole-v1."""


@method("ppo@1", presets={"tiny": TINY, "control": CONTROL, "cartpole": CARTPOLE})
def ppo() -> OnPolicy:
    """Proximal Policy Optimization (arXiv 1707.06347) with a critic and GAE.

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
