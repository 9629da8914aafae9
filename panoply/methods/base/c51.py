"""Distributional deep Q-learning."""

from __future__ import annotations

from panoply.methods.base.dqn import CARTPOLE, CONTROL, dqn
from panoply.regimes import OffPolicy
from panoply.registry import Published, method
from panoply.slots.loss.bellman import categorical_q
from panoply.slots.update.optimisers import adam

LONG = {"policy.span": (0.0, 100.0), "update.lr": 1e-3}


PUBLISHED: Published = {
    "arXiv 1707.06887": {
        "update.lr": 0.00025,
        "update.epsilon": 0.0003125,
        "replay.batch": 32,
    },
}
"""51 points of −10 to 10 are `policy.atoms` and `policy.span`, whose defaults they are."""


@method(
    "c51@1",
    base="dqn",
    presets={"control": CONTROL, "cartpole": CARTPOLE | LONG},
    world="cartpole",
    published=PUBLISHED,
)
def c51() -> OffPolicy:
    """C51 (arXiv 1707.06887): the whole distribution of the return, over 51 points of `policy.span`."""
    return dqn().but(losses=categorical_q(), update=adam(lr=2.5e-4, epsilon=0.01 / 32, clip=0.0))
