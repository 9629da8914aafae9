"""Length-unbiased sequence policy optimization."""

from __future__ import annotations

from panoply.methods.base.gspo import gspo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.surrogate.sequences import sequence_clip

PUBLISHED: Published = {
    "arXiv 2602.05261, §5.1": {"surrogate.low": 2e-3, "surrogate.high": 2.5e-3},
    "arXiv 2602.05261, §4": {"surrogate.lengths": "weigh"},
}


@method("luspo@1", base="gspo", published=PUBLISHED)
def luspo() -> OnPolicy:
    """Length-Unbiased Sequence Policy Optimization (arXiv 2602.05261).

    GSPO gives an answer one vote whatever its length, so a token of a long one learns less and answers shrink; here
    the answer's bounded ratio is multiplied by its length.
    """
    return gspo().but(surrogate=sequence_clip(low=2e-3, high=2.5e-3, lengths="weigh"))
