"""Implicit Q-learning."""

from __future__ import annotations

from panoply.regimes import Offline
from panoply.registry import Published, method
from panoply.slots.data.logged import logged
from panoply.slots.loss.actors import advantage_weighted
from panoply.slots.loss.bellman import expectile_v, q_of_v
from panoply.slots.network.critics import q, v
from panoply.slots.replay.uniform import uniform
from panoply.slots.schedule.schedules import cosine
from panoply.slots.targets.following import polyak
from panoply.slots.update.optimisers import adam

CONTROL = {
    "policy.hidden": (256, 256),
    "policy.activation": "relu",
    "policy.head": "bounded",
    "run.steps": 20,
    "run.evaluate_every": 5,
    "run.checkpoint_every": 5,
}


PUBLISHED: Published = {
    "released code, configs/mujoco_config.py": {
        "update.lr": 0.0003,
        "losses.expectile_v.expectile": 0.7,
        "losses.advantage_weighted.beta": 3.0,
        "replay.gamma": 0.99,
        "targets.tau": 0.005,
        "control:policy.hidden": (256, 256),
    },
    "released code, learner.py": {
        "losses.advantage_weighted.schedule": "cosine",
        "networks.q.count": 2,
        "control:policy.head": "bounded",
        "control:policy.activation": "relu",
    },
    "released code, actor.py": {
        "losses.advantage_weighted.most": 100.0,
    },
    "released code, train_offline.py": {
        "replay.batch": 256,
    },
}


@method(
    "iql@1",
    presets={"control": CONTROL},
    world="logged:pendulum-mixed",
    published=PUBLISHED,
)
def iql() -> Offline:
    """Implicit Q-Learning (arXiv 2110.06169): never ask what an action is worth that the data does not have.

    V is an upper expectile of Q over the data's actions, Q follows V, and the policy imitates what was better than V.
    In an update V moves first, and policy and Q go by what it then says; the policy's rate of learning falls along a
    cosine. The numbers are the authors' for locomotion.
    """
    return Offline(
        data=logged(),
        replay=uniform(batch=256, gamma=0.99, updates=500),
        networks=(q(count=2), v()),
        losses=(
            expectile_v(expectile=0.7),
            advantage_weighted(beta=3.0, most=100.0, schedule=cosine()),
            q_of_v(),
        ),
        targets=polyak(tau=0.005),
        update=adam(lr=3e-4, clip=0.0),
    )
