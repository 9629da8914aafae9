"""Anchored preference optimization, in its two directions."""

from __future__ import annotations

from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.loss.sides import anchored
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.optimisers import adam

PUBLISHED: Published = {
    "arXiv 2408.06266, §5.2": {"losses.anchored.beta": 0.1, "update.lr": 2e-7},
    "arXiv 2408.06266, appendix B.1": {"data.batch": 64},
}


@method("apo-zero@1", base="dpo", published=PUBLISHED)
def apo_zero() -> Dataset:
    """Anchored preference optimization, APO-zero (arXiv 2408.06266, eq. 7): 1 − σ(r⁺) + σ(r⁻).

    For chosen answers that are better than the policy's own: they become likelier, rejected ones less likely, each
    against the reference and whatever the other does.
    """
    return dpo().but(losses=(anchored(chosen="up"),), update=adam(lr=2e-7, schedule=constant(warmup=150)))


@method("apo-down@1", base="apo-zero", published=PUBLISHED)
def apo_down() -> Dataset:
    """Anchored preference optimization, APO-down (arXiv 2408.06266, eq. 8): σ(r⁺) + 1 − σ(r⁺ − r⁻).

    For chosen answers that are worse than the policy's own, as they often are when a strong model learns from weaker
    ones: both sides become less likely, the rejected one more so.
    """
    return apo_zero().but(losses=(anchored(chosen="down"),))
