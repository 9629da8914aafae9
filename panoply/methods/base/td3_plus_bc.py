"""TD3 with behaviour cloning."""

from __future__ import annotations

from panoply.methods.base.iql import CONTROL
from panoply.methods.base.td3 import NOISE
from panoply.regimes import Offline
from panoply.registry import Published, method
from panoply.slots.data.logged import logged
from panoply.slots.loss.actors import best_action
from panoply.slots.loss.bellman import smooth_q
from panoply.slots.network.critics import q
from panoply.slots.replay.uniform import uniform
from panoply.slots.targets.following import polyak
from panoply.slots.update.optimisers import adam

SETTINGS = {**CONTROL, **NOISE, "policy.std": "fixed", "policy.normalise": True}


PUBLISHED: Published = {
    "released code, main.py": {
        "losses.best_action.alpha": 2.5,
        "losses.best_action.every": 2,
        "losses.smooth_q.noise": 0.2,
        "losses.smooth_q.clip": 0.5,
        "replay.batch": 256,
        "replay.gamma": 0.99,
        "targets.tau": 0.005,
        "targets.every": 2,
        "control:policy.normalise": True,
    },
    "released code, TD3_BC.py": {
        "update.lr": 0.0003,
        "control:policy.hidden": (256, 256),
        "control:policy.activation": "relu",
    },
}


@method(
    "td3+bc@1",
    base="td3",
    presets={"control": SETTINGS},
    world="logged:pendulum-mixed",
    published=PUBLISHED,
)
def td3_plus_bc() -> Offline:
    """TD3+BC (arXiv 2106.06860): TD3 on logged data, with a policy that stays near the actions in it.

    The critics' word counts α/|Q|, the squared distance to the data 1; observations are normalised.
    """
    return Offline(
        data=logged(),
        replay=uniform(batch=256, gamma=0.99, updates=500),
        networks=(q(count=2),),
        losses=(smooth_q(noise=0.2, clip=0.5), best_action(every=2, alpha=2.5)),
        targets=polyak(tau=0.005, every=2),
        update=adam(lr=3e-4, clip=0.0),
    )
