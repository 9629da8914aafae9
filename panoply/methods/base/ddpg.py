"""Deep deterministic policy gradient."""

from __future__ import annotations

from panoply.methods.base.sac import CONTROL, PENDULUM
from panoply.methods.base.td3 import NOISE, td3
from panoply.regimes import OffPolicy
from panoply.registry import Published, method
from panoply.slots.loss.actors import best_action
from panoply.slots.loss.bellman import smooth_q
from panoply.slots.network.critics import q
from panoply.slots.replay.uniform import uniform
from panoply.slots.targets.following import polyak
from panoply.slots.update.optimisers import adam

WIDE = {"policy.hidden": (400, 300)}
QUICK = {"losses.best_action.update.lr": 1e-3, "targets.tau": 0.005, "replay.batch": 256}


PUBLISHED: Published = {
    "arXiv 1509.02971, §7": {
        "update.lr": 0.001,
        "losses.best_action.update.lr": 0.0001,
        "replay.batch": 64,
        "replay.size": 1000000,
        "replay.gamma": 0.99,
        "targets.tau": 0.001,
        "networks.q.count": 1,
        "control:policy.hidden": (400, 300),
    },
}


@method(
    "ddpg@1",
    base="td3",
    presets={"control": CONTROL | NOISE | WIDE, "pendulum": PENDULUM | NOISE | QUICK},
    world="pendulum",
    published=PUBLISHED,
)
def ddpg() -> OffPolicy:
    """Deep Deterministic Policy Gradient (arXiv 1509.02971): one critic, and a policy that climbs it.

    Exploration is normal noise; the paper's is correlated in time. Its weight decay of the critic is left out.
    """
    return td3().but(
        replay=uniform(batch=64, gamma=0.99, warmup=100),
        networks=q(count=1),
        losses=(smooth_q(noise=0.0), best_action(update=adam(lr=1e-4, clip=0.0))),
        targets=polyak(tau=0.001),
    )
