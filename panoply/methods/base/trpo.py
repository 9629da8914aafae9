"""Trust region policy optimization."""

from __future__ import annotations

from panoply.methods.base.npg import npg
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.update.natural import natural

PUBLISHED: Published = {
    "arXiv 1502.05477, appendix D": {
        "update.delta": 0.01,
        "credit.gamma": 0.99,
        "update.fisher": "exact",
    },
    "SB3-contrib 2.9": {
        "credit.lam": 0.95,
        "update.damping": 0.1,
        "update.iterations": 15,
        "update.search": 10,
        "update.shrink": 0.8,
        "models.critic.update.lr": 0.001,
        "models.critic.update.epochs": 10,
        "models.critic.update.minibatches": 16,
    },
}


@method(
    "trpo@1",
    base="npg",
    world="cartpole",
    published=PUBLISHED,
)
def trpo() -> OnPolicy:
    """Trust region policy optimization (arXiv 1502.05477).

    The natural gradient's step, shortened until the surrogate has really improved and the policy has moved by a KL of
    δ at most. Fisher matrix and KL(old‖new) are of whole distributions. The numbers are those of SB3-contrib.
    """
    return npg().but(update=natural(delta=0.01, search=10))
