"""DPO for labels of which some are wrong."""

from __future__ import annotations

from panoply.methods.base.dpo import TINY as DPO_TINY
from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.data.teacher import teacher_pairs
from panoply.slots.loss.pairs import robust
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.optimisers import adam

TINY = {**DPO_TINY, "data.batch": 64}

PUBLISHED: Published = {
    "arXiv 2403.00409, appendix B": {"data.batch": 16, "losses.robust.beta": 0.1, "update.lr": 1e-3},
    "arXiv 2403.00409, §6": {"losses.robust.flips": 0.1},
}


@method("robust-dpo@1", base="dpo", presets={"tiny": TINY}, published=PUBLISHED)
def robust_dpo() -> Dataset:
    """Robust DPO (arXiv 2403.00409): [(1 − ε)·L(m) − ε·L(−m)]/(1 − 2ε).

    Where a share ε of the pairs is swapped, this is an unbiased estimate of the loss on clean ones; conservative DPO
    (`losses.logistic.smoothing`) adds the second term instead and only softens the labels.
    """
    return dpo().but(
        data=teacher_pairs(batch=16),
        losses=(robust(beta=0.1, flips=0.1),),
        update=adam(lr=1e-3, schedule=constant(warmup=150)),
    )
