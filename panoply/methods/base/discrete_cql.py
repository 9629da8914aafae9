"""Conservative Q-learning where actions can be counted."""

from __future__ import annotations

from panoply.regimes import Offline
from panoply.registry import Published, method
from panoply.slots.data.logged import logged
from panoply.slots.loss.bellman import q_learning
from panoply.slots.replay.uniform import uniform
from panoply.slots.targets.following import polyak
from panoply.slots.update.optimisers import adam

CONTROL = {
    "policy.hidden": (256, 256),
    "policy.activation": "relu",
    "targets.every": 100,
    "update.lr": 3e-4,
    "run.steps": 20,
    "run.evaluate_every": 5,
    "run.checkpoint_every": 5,
}
"""Targets that are copied sooner, and a larger rate: for runs of thousands of updates and not of millions."""


PUBLISHED: Published = {
    "d3rlpy 2.8": {
        "losses.q_learning.conservative": 1.0,
        "losses.q_learning.double": True,
        "replay.batch": 32,
        "replay.gamma": 0.99,
        "targets.every": 8000,
        "targets.tau": 1.0,
        "update.lr": 6.25e-05,
        "control:policy.hidden": (256, 256),
        "control:policy.activation": "relu",
    },
}


@method(
    "discrete-cql@1",
    base="double-dqn",
    presets={"control": CONTROL},
    world="logged:cartpole-mixed",
    published=PUBLISHED,
)
def discrete_cql() -> Offline:
    """Conservative Q-Learning (arXiv 2006.04779) of n actions: Double DQN on logged data, with actions the data lacks
    pressed down.

    The sum over actions is exact, and the greedy policy is the one it is about. Without it
    (`losses.q_learning.conservative=0`) this is deep Q-learning on logged data. The numbers are d3rlpy's.
    """
    return Offline(
        data=logged(),
        replay=uniform(batch=32, gamma=0.99, updates=500),
        losses=(q_learning(double=True, conservative=1.0),),
        targets=polyak(tau=1.0, every=8000),
        update=adam(lr=6.25e-5, clip=0.0),
    )
