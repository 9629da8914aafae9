"""Group Sequence Policy Optimization."""

from __future__ import annotations

from panoply.methods.base.grpo import grpo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.surrogate.sequences import sequence_clip
from panoply.slots.update.optimisers import adam

TINY = {
    "sample.group": 8,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "update.minibatches": 2,
    "run.steps": 150,
}


PUBLISHED: Published = {
    "arXiv 2507.18071, §5.1": {"surrogate.low": 3e-4, "surrogate.high": 4e-4, "update.minibatches": 4},
    "the authors in volcengine/verl, pull request 2775": {"regularise.kl.weight": None},
}


@method("gspo@1", base="grpo", presets={"tiny": TINY}, published=PUBLISHED)
def gspo() -> OnPolicy:
    """Group Sequence Policy Optimization (arXiv 2507.18071).

    The reward is given to a sequence, so the ratio is a sequence's: s = (π(y)/π_old(y))^{1/|y|}, bounded as a whole.
    The bounds are tiny (3e-4 below, 4e-4 above), since a geometric mean over many tokens hardly moves, and far more
    tokens are left out than under GRPO. No KL term.
    """
    return grpo().but(
        surrogate=sequence_clip(low=3e-4, high=4e-4),
        regularise=(),
        update=adam(lr=1e-6, minibatches=4),
    )
