"""Noise contrastive alignment."""

from __future__ import annotations

from panoply.methods.base.dpo import TINY as DPO_TINY
from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.data.teacher import teacher_pairs
from panoply.slots.loss.sides import noise_contrast
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.optimisers import adam

TINY = {**DPO_TINY, "data.batch": 64}

PUBLISHED: Published = {
    "arXiv 2402.05369, appendix C": {"data.batch": 32, "losses.noise_contrast.beta": 0.01, "update.lr": 5e-6},
}


@method("nca@1", base="dpo", presets={"tiny": TINY}, published=PUBLISHED)
def nca() -> Dataset:
    """Noise contrastive alignment, NCA (arXiv 2402.05369), on pairs.

    −log σ(r⁺) − ½·log σ(−r⁺) − ½·log σ(−r⁻), r = β·log π/π_ref: each side is classified by itself, so that what is
    chosen does not become less likely, which DPO allows.
    """
    return dpo().but(
        data=teacher_pairs(batch=32),
        losses=(noise_contrast(beta=0.01),),
        update=adam(lr=5e-6, schedule=constant(warmup=150)),
    )
