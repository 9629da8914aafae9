"""Advantage actor-critic."""

from __future__ import annotations

from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.gae import gae
from panoply.slots.loss.values import squared_value
from panoply.slots.model.values import critic
from panoply.slots.reduce.averages import token_mean
from panoply.slots.reward.signals import signal
from panoply.slots.sample.rollout import rollout
from panoply.slots.surrogate.ratios import log_likelihood
from panoply.slots.update.optimisers import rmsprop

CONTROL = {
    "run.steps": 2500,
    "run.evaluate_every": 250,
    "run.checkpoint_every": 250,
    "run.episodes_every": 250,
}


PUBLISHED: Published = {
    "Stable-Baselines3 2.9": {
        "sample.length": 5,
        "credit.gamma": 0.99,
        "credit.lam": 1.0,
        "credit.normalise": False,
        "update": "rmsprop",
        "update.lr": 0.0007,
        "update.decay": 0.99,
        "update.epsilon": 1e-05,
        "update.clip": 0.5,
        "models.critic.loss.weight": 1.0,
        "models.critic.update": None,
    },
    "RL Baselines3 Zoo, CartPole-v1": {
        "sample.envs": 8,
    },
}
"""½·error² with weight 1 is their 0.5·error²."""


@method(
    "a2c@1",
    world="cartpole",
    presets={"control": CONTROL},
    published=PUBLISHED,
)
def a2c() -> OnPolicy:
    """Advantage actor-critic (arXiv 1602.01783), its synchronous form.

    A few steps of some environments, n-step returns against a critic, one update of both in one pass; then forget. The
    numbers are Stable-Baselines3's.
    """
    return OnPolicy(
        sample=rollout(envs=8, length=5),
        reward=signal(),
        credit=gae(gamma=0.99, lam=1.0, normalise=False),
        surrogate=log_likelihood(),
        reduce=token_mean(),
        update=rmsprop(lr=7e-4, clip=0.5),
        models=(critic(loss=squared_value(), update=None),),
    )
