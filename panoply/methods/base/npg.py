"""The natural policy gradient."""

from __future__ import annotations

from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.gae import gae
from panoply.slots.loss.values import squared_value
from panoply.slots.model.values import critic
from panoply.slots.reduce.averages import token_mean
from panoply.slots.reward.signals import signal
from panoply.slots.sample.rollout import rollout
from panoply.slots.surrogate.ratios import ratio
from panoply.slots.update.natural import natural
from panoply.slots.update.optimisers import adam

CONTROL = {"run.steps": 50, "run.evaluate_every": 10}


PUBLISHED: Published = {
    "SB3-contrib 2.9, TRPO": {
        "credit.gamma": 0.99,
        "credit.lam": 0.95,
        "update.delta": 0.01,
        "update.damping": 0.1,
        "update.iterations": 15,
        "models.critic.update.lr": 0.001,
        "models.critic.update.epochs": 10,
        "models.critic.update.minibatches": 16,
    },
}
"""2,048 steps in mini-batches of 128."""


@method(
    "npg@1",
    world="cartpole",
    presets={"control": CONTROL},
    published=PUBLISHED,
)
def npg() -> OnPolicy:
    """The natural policy gradient (Kakade 2001), with GAE and a step as long as a KL of δ allows.

    The gradient is divided by the policy's own Fisher matrix, so that the step does not depend on how the policy is
    parametrised. The critic learns on its own.
    """
    return OnPolicy(
        sample=rollout(envs=8, length=256),
        reward=signal(),
        credit=gae(gamma=0.99, lam=0.95),
        surrogate=ratio(),
        reduce=token_mean(),
        update=natural(delta=0.01),
        models=(critic(loss=squared_value(), update=adam(lr=1e-3, epochs=10, minibatches=16)),),
    )
