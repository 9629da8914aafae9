"""Conservative Q-learning."""

from __future__ import annotations

from panoply.methods.base.iql import CONTROL
from panoply.regimes import Offline
from panoply.registry import Published, method
from panoply.slots.data.logged import logged
from panoply.slots.loss.soft import conservative_q, soft_policy
from panoply.slots.network.critics import q, temperature
from panoply.slots.replay.uniform import uniform
from panoply.slots.targets.following import polyak
from panoply.slots.update.optimisers import adam

SETTINGS = {
    **{k: v for k, v in CONTROL.items() if k != "policy.head"},
    "policy.hidden": (256, 256, 256),
    "losses.soft_policy.imitate": 400,
}
"""A run of 10,000 updates imitates for as small a share of them as the authors' million."""
LAGRANGE = {
    **SETTINGS,
    "losses.conservative_q.weight": 1.0,
    "losses.conservative_q.threshold": 5.0,
    "networks.multiplier.start": 1.0,
}


PUBLISHED: Published = {
    "released code, d4rl/examples/cql_mujoco_new.py": {
        "losses.conservative_q.weight": 5.0,
        "losses.conservative_q.samples": 10,
        "losses.conservative_q.soft": False,
        "losses.soft_policy.imitate": 40000,
        "losses.soft_policy.update.lr": 0.0001,
        "update.lr": 0.0003,
        "replay.batch": 256,
        "replay.gamma": 0.99,
        "targets.tau": 0.005,
        "networks.q.count": 2,
        "control:policy.hidden": (256, 256, 256),
        "lagrange:losses.conservative_q.weight": 1.0,
        "lagrange:losses.conservative_q.threshold": 5.0,
    },
    "released code, d4rl/rlkit/torch/sac/cql.py": {
        "networks.temperature.start": 1.0,
        "lagrange:networks.multiplier.start": 1.0,
    },
}
"""5 or 10 is the weight without a threshold."""


@method(
    "cql@1",
    base="sac",
    presets={"control": SETTINGS, "lagrange": LAGRANGE},
    world="logged:pendulum-mixed",
    published=PUBLISHED,
)
def cql() -> Offline:
    """Conservative Q-Learning (arXiv 2006.04779): SAC on logged data, with actions the data lacks pressed down.

    The policy imitates the data in the first 40,000 updates, while critics know nothing. With `--preset lagrange` how
    hard actions are pressed is learned, so that the gap between all of them and the data's stays at a threshold. The
    numbers are those of the authors' code for locomotion.
    """
    return Offline(
        data=logged(),
        replay=uniform(batch=256, gamma=0.99, updates=500),
        networks=(q(count=2), temperature(start=1.0)),
        losses=(conservative_q(weight=5.0), soft_policy(imitate=40_000, update=adam(lr=1e-4, clip=0.0))),
        targets=polyak(tau=0.005),
        update=adam(lr=3e-4, clip=0.0),
    )
