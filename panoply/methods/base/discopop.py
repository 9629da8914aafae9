"""A loss that a language model found."""

from __future__ import annotations

from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.loss.pairs import discovered
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.optimisers import adam

PUBLISHED: Published = {
    "arXiv 2406.08414, appendix B.1": {"data.batch": 64, "losses.discovered.beta": 0.05, "update.lr": 5e-7},
    "arXiv 2406.08414, appendix E": {"losses.discovered.tau": 0.05},
}


@method("discopop@1", base="dpo", published=PUBLISHED)
def discopop() -> Dataset:
    """DiscoPOP (arXiv 2406.08414): (1 − w)·(−log σ(m)) + w·e^{−m}, w = σ(m/τ).

    A language model was asked for better losses than DPO's, again and again; this one won. It is not convex.
    """
    return dpo().but(
        losses=(discovered(beta=0.05, tau=0.05),), update=adam(lr=5e-7, schedule=constant(warmup=150))
    )
