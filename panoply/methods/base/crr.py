"""Critic-regularised regression."""

from __future__ import annotations

from panoply.methods.base.iql import CONTROL
from panoply.regimes import Offline
from panoply.registry import Published, method
from panoply.slots.data.logged import logged
from panoply.slots.loss.actors import critic_weighted
from panoply.slots.loss.bellman import expected_q
from panoply.slots.network.critics import q
from panoply.slots.replay.uniform import uniform
from panoply.slots.targets.following import polyak
from panoply.slots.update.optimisers import adam

PUBLISHED: Published = {
    "arXiv 2006.15134": {
        "losses.critic_weighted.form": "exp",
        "losses.critic_weighted.beta": 1.0,
        "losses.critic_weighted.most": 20.0,
        "losses.critic_weighted.samples": 4,
        "losses.expected_q.follow": "target",
        "targets.every": 100,
    },
    "d3rlpy 2.8": {
        "replay.batch": 100,
        "replay.gamma": 0.99,
        "update.lr": 0.0003,
        "networks.q.count": 1,
        "targets.tau": 1.0,
    },
}


@method(
    "crr@1",
    base="awac",
    presets={"control": CONTROL},
    world="logged:pendulum-mixed",
    published=PUBLISHED,
)
def crr() -> Offline:
    """Critic-regularised regression (arXiv 2006.15134): imitate what a critic finds better than the policy's own.

    The weight is exp(A/β), at most 20, or with `losses.critic_weighted.form=binary` 1 where A > 0; A is an action's
    value less the mean of four of the policy's. Targets of critic and policy are copied after every 100 updates. The
    critic is one network of values, where the paper's gives distributions of returns; batch, rate and copies are
    d3rlpy's.
    """
    return Offline(
        data=logged(),
        replay=uniform(batch=100, gamma=0.99, updates=500),
        networks=(q(count=1),),
        losses=(expected_q(follow="target"), critic_weighted(form="exp", beta=1.0, most=20.0, samples=4)),
        targets=polyak(tau=1.0, every=100),
        update=adam(lr=3e-4, clip=0.0),
    )
