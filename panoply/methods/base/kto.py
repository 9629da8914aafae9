"""Kahneman–Tversky Optimization."""

from __future__ import annotations

from panoply.methods.base.dpo import TINY as DPO_TINY
from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.data.teacher import teacher_pairs
from panoply.slots.data.unpaired import unpaired
from panoply.slots.loss.unpaired import prospect
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.optimisers import adam

TINY = {**DPO_TINY, "data.data.batch": 64, "losses.prospect.beta": 0.5, "update.lr": 3e-4}


PUBLISHED: Published = {
    "ContextualAI/HALOs, config/config.yaml": {
        "update": "adam",
        "update.lr": 5e-6,
        "update.weight_decay": 0.01,
        "update.beta1": 0.9,
        "update.beta2": 0.999,
        "update.schedule.warmup": 0.1,
    },
    "ContextualAI/HALOs, launch.py": {"update.schedule": "constant", "update.epsilon": 1e-8},
    "ContextualAI/HALOs, config/model/base_model.yaml": {"data.data.batch": 16, "update.clip": 1.0},
    "ContextualAI/HALOs, config/loss/kto.yaml": {
        "losses.prospect.beta": 0.1,
        "losses.prospect.desirable": 1.0,
        "losses.prospect.undesirable": 1.0,
    },
}
"""16 pairs are 32 answers. The code's configuration also names an ε of 1e-5, but does not hand it to the optimiser."""


@method("kto@1", base="dpo", presets={"tiny": TINY}, published=PUBLISHED)
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
        update=adam(lr=5e-6, weight_decay=0.01, schedule=constant(warmup=0.1)),
    )
