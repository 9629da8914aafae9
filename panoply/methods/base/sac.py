"""Soft actor-critic."""

from __future__ import annotations

from panoply.regimes import OffPolicy
from panoply.registry import Published, method
from panoply.slots.loss.soft import soft_policy, soft_q
from panoply.slots.network.critics import q, temperature
from panoply.slots.replay.uniform import uniform
from panoply.slots.sample.explore import explore
from panoply.slots.targets.following import polyak
from panoply.slots.update.optimisers import adam

CONTROL = {
    "policy.hidden": (256, 256),
    "policy.activation": "relu",
    "run.steps": 1000,
    "run.evaluate_every": 10,
    "run.checkpoint_every": 50,
}
PENDULUM = {
    **CONTROL,
    "update.lr": 1e-3,
    "sample.length": 500,
    "run.steps": 20,
    "run.evaluate_every": 4,
    "run.checkpoint_every": 4,
}
"""RL Baselines3 Zoo's rate of learning for Pendulum-v1, and half its steps."""


PUBLISHED: Published = {
    "arXiv 1812.05905, table 1": {
        "update.lr": 0.0003,
        "replay.batch": 256,
        "replay.size": 1000000,
        "replay.gamma": 0.99,
        "targets.tau": 0.005,
        "losses.soft_policy.entropy": None,
        "control:policy.hidden": (256, 256),
        "control:policy.activation": "relu",
    },
    "Stable-Baselines3 2.9": {
        "replay.warmup": 100,
        "sample.random": 100,
        "networks.temperature.start": 1.0,
    },
}
"""No number for the entropy means minus the number of dimensions."""


@method(
    "sac@1",
    presets={"control": CONTROL, "pendulum": PENDULUM},
    world="pendulum",
    published=PUBLISHED,
)
def sac() -> OffPolicy:
    """Soft Actor-Critic (arXiv 1812.05905): earn much and stay as random as a target asks.

    Twin critics, a squashed Gaussian policy, and a temperature that is tuned to hold the entropy at minus the number of
    action dimensions.
    """
    return OffPolicy(
        sample=explore(random=100),
        replay=uniform(batch=256, gamma=0.99, warmup=100),
        networks=(q(count=2), temperature(start=1.0)),
        losses=(soft_q(), soft_policy()),
        targets=polyak(tau=0.005),
        update=adam(lr=3e-4, clip=0.0),
    )
