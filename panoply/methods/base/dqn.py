"""Deep Q-learning."""

from __future__ import annotations

from panoply.regimes import OffPolicy
from panoply.registry import Published, method
from panoply.slots.loss.bellman import q_learning
from panoply.slots.replay.uniform import uniform
from panoply.slots.sample.explore import explore
from panoply.slots.targets.following import polyak
from panoply.slots.update.optimisers import adam

CONTROL = {
    "policy.activation": "relu",
    "policy.epsilon": 0.05,
    "sample.start": 20.0,
    "sample.fade": 10_000,
    "sample.random": 100,
    "replay.warmup": 100,
    "targets.every": 2500,
    "run.steps": 100,
    "run.evaluate_every": 10,
    "run.checkpoint_every": 25,
}
"""Stable-Baselines3's defaults; ε goes from 1 to 0.05 over a tenth of 100,000 steps."""
CARTPOLE = {
    **CONTROL,
    "policy.hidden": (256, 256),
    "policy.epsilon": 0.04,
    "sample.length": 1024,
    "sample.start": 25.0,
    "sample.fade": 8_000,
    "replay.batch": 64,
    "replay.size": 100_000,
    "replay.warmup": 1000,
    "replay.every": 256,
    "replay.updates": 128,
    "targets.every": 128,
    "update.lr": 2.3e-3,
    "run.steps": 49,
    "run.evaluate_every": 7,
}
"""RL Baselines3 Zoo's numbers for CartPole-v1; the target is copied once in 256 steps there too. Returns go up and down
on the way in either library, so the best checkpoint is the one to keep."""


PUBLISHED: Published = {
    "doi 10.1038/nature14236, extended data table 1": {
        "replay.batch": 32,
        "replay.size": 1000000,
        "replay.gamma": 0.99,
        "replay.every": 4,
        "replay.warmup": 50000,
        "sample.random": 50000,
        "sample.fade": 1000000,
        "targets.every": 10000,
        "targets.tau": 1.0,
    },
    "Stable-Baselines3 2.9": {
        "update.lr": 0.0001,
        "update.clip": 10.0,
        "control:policy.epsilon": 0.05,
        "control:replay.warmup": 100,
        "control:targets.every": 2500,
    },
    "RL Baselines3 Zoo, CartPole-v1": {
        "cartpole:policy.hidden": (256, 256),
        "cartpole:policy.epsilon": 0.04,
        "cartpole:replay.batch": 64,
        "cartpole:replay.size": 100000,
        "cartpole:replay.warmup": 1000,
        "cartpole:replay.every": 256,
        "cartpole:replay.updates": 128,
        "cartpole:update.lr": 0.0023,
    },
}
"""SB3 counts the 10,000 steps between copies in steps of the world, four to an update."""


@method(
    "dqn@1",
    presets={"control": CONTROL, "cartpole": CARTPOLE},
    world="cartpole",
    published=PUBLISHED,
)
def dqn() -> OffPolicy:
    """Deep Q-learning (doi 10.1038/nature14236): the policy is what each action is worth, and takes the best.

    Learned from a replay against a copy that stands still for a while; Adam instead of RMSProp.
    """
    return OffPolicy(
        sample=explore(random=50_000, start=20.0, fade=1_000_000),
        replay=uniform(batch=32, gamma=0.99, warmup=50_000, every=4),
        losses=(q_learning(),),
        targets=polyak(tau=1.0, every=10_000),
        update=adam(lr=1e-4, clip=10.0),
    )
