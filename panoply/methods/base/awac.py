"""Advantage-weighted actor-critic."""

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

SETTINGS = {**CONTROL, "replay.batch": 256}
"""Smaller batches, for runs of thousands of updates and not of millions."""


PUBLISHED: Published = {
    "released code, examples/awac/mujoco/awac1.py": {
        "replay.batch": 1024,
        "replay.gamma": 0.99,
        "targets.tau": 0.005,
        "update.lr": 0.0003,
        "losses.critic_weighted.update.lr": 0.0003,
        "losses.critic_weighted.update.weight_decay": 0.0001,
        "losses.critic_weighted.beta": 2.0,
    },
    "released code, rlkit/torch/sac/awac_trainer.py": {
        "losses.critic_weighted.form": "softmax",
        "losses.critic_weighted.over": "mean",
        "losses.critic_weighted.samples": 1,
        "losses.expected_q.follow": "policy",
    },
}


@method(
    "awac@1",
    base="awr",
    presets={"control": SETTINGS},
    world="logged:pendulum-mixed",
    published=PUBLISHED,
)
def awac() -> Offline:
    """AWAC (arXiv 2006.09359): imitate what was done, weighted by how much better critics find it than the policy.

    Unlike AWR it asks critics of the policy itself, so that data may be of anyone; unlike IQL it asks them of actions
    that the data does not have. Made to go on with own experience (`--sample explore`). The numbers are those of the
    released code, where weights are a softmax over the batch; its policy has four layers and its critics two, here
    both have the same.
    """
    return Offline(
        data=logged(),
        replay=uniform(batch=1024, gamma=0.99, updates=500),
        networks=(q(count=2),),
        losses=(
            expected_q(),
            critic_weighted(
                form="softmax", beta=2.0, samples=1, update=adam(lr=3e-4, weight_decay=1e-4, clip=0.0)
            ),
        ),
        targets=polyak(tau=0.005),
        update=adam(lr=3e-4, clip=0.0),
    )
