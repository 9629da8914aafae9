"""Proximal Policy Optimization."""

from __future__ import annotations

from panoply.regimes import OnPolicy
from panoply.registry import Published, method
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


PUBLISHED: Published = {
    "arXiv 1707.06347, table 3": {
        "credit.lam": 0.95,
        "control:sample.length": 2048,
        "control:credit.gamma": 0.99,
        "control:update.lr": 3e-4,
        "control:update.epochs": 10,
        "control:update.minibatches": 32,
    },
    "arXiv 1707.06347, table 1": {"surrogate.low": 0.2, "surrogate.high": 0.2},
    "Stable-Baselines3 2.9": {
        "control:sample.envs": 1,
        "control:update.epsilon": 1e-5,
        "control:update.clip": 0.5,
        "control:models.critic.loss.weight": 1.0,
        "control:models.critic.loss.clip": None,
        "control:models.critic.update": None,
    },
    "RL Baselines3 Zoo, CartPole-v1": {
        "cartpole:sample.envs": 8,
        "cartpole:sample.length": 32,
        "cartpole:credit.gamma": 0.98,
        "cartpole:credit.lam": 0.8,
        "cartpole:update.lr": 1e-3,
        "cartpole:update.schedule": "linear",
        "cartpole:update.epochs": 20,
        "cartpole:update.minibatches": 1,
    },
}
"""The paper has no language model; what else is set here by default is usual for one."""


@method("ppo@1", presets={"tiny": TINY, "control": CONTROL, "cartpole": CARTPOLE}, published=PUBLISHED)
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
