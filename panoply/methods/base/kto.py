"""Kahneman–Tversky Optimization."""

from __future__ import annotations

from panoply.methods.base.dpo import TINY as DPO_TINY
from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import method
from panoply.slots.data.teacher import teacher_pairs
from panoply.slots.data.unpaired import unpaired
from panoply.slots.loss.unpaired import prospect
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.optimisers import adam

TINY = {**DPO_TINY, "data.data.batch": 64, "losses.prospect.beta": 0.5, "update.lr": 3e-4}


@method("kto@1", base="dpo", presets={"tiny": TINY})
def kto() -> Dataset:
    """Kahneman–Tversky Optimization (arXiv 2402.01306).

    Thumbs up or down on single answers instead of pairs: λ·(1 − σ(±β·(ℓ − z₀))). z₀ estimates KL(π‖π_ref) from
    answers put after the wrong prompts and carries no gradient. The loss is not monotone in effort: very bad and very
    good answers both saturate, so noise is ignored and so are the hardest examples. Numbers as in the released code:
    32 answers a step, a larger learning rate than DPO's.
    """
    return dpo().but(
        data=unpaired(data=teacher_pairs(batch=16)),
        losses=(prospect(beta=0.1),),
        update=adam(lr=5e-6, schedule=constant(warmup=150)),
    )
