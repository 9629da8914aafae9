"""Binary classifier optimization."""

from __future__ import annotations

from panoply.methods.base.dpo import TINY as DPO_TINY
from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.data.teacher import teacher_pairs
from panoply.slots.loss.sides import binary
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.optimisers import adam

TINY = {**DPO_TINY, "data.batch": 64}

PUBLISHED: Published = {
    "arXiv 2404.04656, appendix C": {"data.batch": 128, "losses.binary.beta": 0.01, "update.lr": 5e-7},
    "arXiv 2404.04656, §4": {"losses.binary.shift": True},
}


@method("bco@1", base="dpo", presets={"tiny": TINY}, published=PUBLISHED)
def bco() -> Dataset:
    """Binary classifier optimization, BCO (arXiv 2404.04656), on pairs.

    −log σ(r⁺ − δ) − log σ(δ − r⁻), r = β·log π/π_ref and δ the mean reward: an upper bound of DPO's loss that needs no
    pairing. TRL's `bco_pair` leaves δ out (`losses.binary.shift=false`).
    """
    return dpo().but(
        data=teacher_pairs(batch=128),
        losses=(binary(beta=0.01),),
        update=adam(lr=5e-7, schedule=constant(warmup=150)),
    )
