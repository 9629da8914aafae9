"""IMPALA: actors that lag behind the learner."""

from __future__ import annotations

from panoply.methods.base.a2c import CONTROL as A2C_CONTROL
from panoply.methods.base.a2c import a2c
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.vtrace import vtrace
from panoply.slots.loss.values import squared_value
from panoply.slots.model.values import critic
from panoply.slots.regularise.terms import entropy
from panoply.slots.sample.rollout import rollout
from panoply.slots.schedule.schedules import linear
from panoply.slots.update.optimisers import rmsprop

CONTROL = {
    "sample.envs": 8,
    "sample.length": 5,
    "update.lr": 7e-4,
    "update.epsilon": 1e-5,
    "update.clip": 0.5,
    "regularise.entropy.weight": 0.0,
    **A2C_CONTROL,
}
"""A2C's numbers, which fit small networks."""
PUBLISHED: Published = {
    "released code, experiment.py": {
        "sample.envs": 2,
        "sample.length": 100,
        "credit.gamma": 0.99,
        "regularise.entropy.weight": 2.5e-4,
        "models.critic.loss.weight": 0.5,
        "models.critic.update": None,
        "update": "rmsprop",
        "update.lr": 4.8e-4,
        "update.decay": 0.99,
        "update.epsilon": 0.1,
        "update.schedule": "linear",
        "update.clip": 0.0,
    },
    "released code, vtrace.py": {
        "credit.rho": 1.0,
        "credit.c": 1.0,
        "credit.lam": 1.0,
        "credit.normalise": False,
    },
}


@method("impala@1", base="a2c", world="cartpole", presets={"control": CONTROL}, published=PUBLISHED)
def impala() -> OnPolicy:
    """IMPALA (arXiv 1802.01561): who acts lags behind who learns, and V-trace makes up for it.

    An actor-critic whose experience is of the policy some steps ago. Errors of the critic are weighted by the ratio of
    the two policies, bounded at 1, so that values and gradients are of the policy as it is. The numbers are those of
    the released code, whose losses are sums over the batch and not means as here.
    """
    return a2c().but(
        sample=rollout(envs=2, length=100, by="past:1"),
        credit=vtrace(gamma=0.99, rho=1.0, c=1.0),
        regularise=(entropy(weight=2.5e-4),),
        update=rmsprop(lr=4.8e-4, decay=0.99, epsilon=0.1, clip=0.0, schedule=linear()),
        models=(critic(loss=squared_value(weight=0.5), update=None),),
    )
