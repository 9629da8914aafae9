"""Advantage-weighted regression."""

from __future__ import annotations

from panoply.methods.base.iql import CONTROL
from panoply.regimes import Offline
from panoply.registry import Published, method
from panoply.slots.data.logged import logged
from panoply.slots.loss.actors import return_weighted
from panoply.slots.loss.bellman import return_v
from panoply.slots.network.critics import v
from panoply.slots.replay.uniform import uniform
from panoply.slots.targets.following import polyak
from panoply.slots.update.optimisers import adam

PUBLISHED: Published = {
    "released code, learning/awr_agent.py": {
        "losses.return_v.lam": 0.95,
        "losses.return_weighted.beta": 1.0,
        "losses.return_weighted.most": 20.0,
    },
    "released code, awr_configs.py": {
        "replay.batch": 256,
        "replay.gamma": 0.99,
    },
}


@method(
    "awr@1",
    presets={"control": CONTROL},
    world="logged:pendulum-mixed",
    published=PUBLISHED,
)
def awr() -> Offline:
    """Advantage-Weighted Regression (arXiv 1910.00177) on logged data: two regressions, of V on returns and of the
    policy on actions, weighted by how much better it went than V said.

    β, the weight's limit and λ are those of the authors' code, which normalises advantages over the data too; Adam
    instead of SGD with momentum, and as many updates of V as of the policy instead of a fifth.
    """
    return Offline(
        data=logged(),
        replay=uniform(batch=256, gamma=0.99, updates=500),
        networks=(v(),),
        losses=(return_v(lam=0.95), return_weighted(beta=1.0, most=20.0)),
        targets=polyak(),
        update=adam(lr=3e-4, clip=0.0),
    )
