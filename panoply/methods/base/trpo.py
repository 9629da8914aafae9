"""Trust region policy optimization."""

from __future__ import annotations

from panoply.methods.base.npg import npg
from panoply.regimes import OnPolicy
from panoply.registry import method
from panoply.slots.update.natural import natural

CONTROL = {"run.steps": 50, "run.evaluate_every": 10}


@method("trpo@1", base="npg", world="cartpole", presets={"control": CONTROL})
def trpo() -> OnPolicy:
    """Trust region policy optimization (arXiv 1502.05477).

    The natural gradient's step, shortened until the surrogate has really improved and the policy has moved by a KL of
    δ at most. Fisher matrix and KL(old‖new) are of whole distributions. The numbers are those of SB3-contrib.
    """
    return npg().but(update=natural(delta=0.01, search=10))
