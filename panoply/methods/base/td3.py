"""Twin delayed deep deterministic policy gradient."""

from __future__ import annotations

from panoply.methods.base.sac import CONTROL, PENDULUM
from panoply.regimes import OffPolicy
from panoply.registry import Published, method
from panoply.slots.loss.actors import best_action
from panoply.slots.loss.bellman import smooth_q
from panoply.slots.network.critics import q
from panoply.slots.replay.uniform import uniform
from panoply.slots.sample.explore import explore
from panoply.slots.targets.following import polyak
from panoply.slots.update.optimisers import adam

NOISE = {"policy.log_std": -2.3}
"""Exploration with a deviation of 0.1, in units of half the range of an action."""


PUBLISHED: Published = {
    "arXiv 1802.09477": {
        "losses.smooth_q.noise": 0.2,
        "losses.smooth_q.clip": 0.5,
        "losses.best_action.every": 2,
        "targets.every": 2,
        "targets.tau": 0.005,
        "replay.gamma": 0.99,
        "update.lr": 0.001,
        "networks.q.count": 2,
    },
    "Stable-Baselines3 2.9": {
        "replay.batch": 256,
        "replay.warmup": 100,
        "sample.random": 100,
        "control:policy.activation": "relu",
    },
}


@method(
    "td3@1",
    presets={"control": CONTROL | NOISE, "pendulum": PENDULUM | NOISE},
    world="pendulum",
    published=PUBLISHED,
)
def td3() -> OffPolicy:
    """Twin Delayed DDPG (arXiv 1802.09477): the more cautious of two critics, noise on the target's action, and a
    policy that moves in every second update."""
    return OffPolicy(
        sample=explore(random=100),
        replay=uniform(batch=256, gamma=0.99, warmup=100),
        networks=(q(count=2),),
        losses=(smooth_q(noise=0.2, clip=0.5), best_action(every=2)),
        targets=polyak(tau=0.005, every=2),
        update=adam(lr=1e-3, clip=0.0),
    )
