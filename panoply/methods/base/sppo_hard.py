"""SPPO on given pairs."""

from __future__ import annotations

from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.loss.sides import squared_sides
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.optimisers import adam

PUBLISHED: Published = {
    "arXiv 2405.00675, §5": {"data.batch": 64, "losses.squared_sides.beta": 1e-3, "update.lr": 5e-7},
}


@method("sppo-hard@1", base="dpo", published=PUBLISHED)
def sppo_hard() -> Dataset:
    """SPPO with hard labels (arXiv 2405.00675, eq. 4.7): each side of a given pair is regressed on ±η/2.

    That is its loss with win rates 1 and 0. The paper samples its answers and estimates win rates (`panoply show
    sppo`); TRL offers this form as `sppo_hard`.
    """
    return dpo().but(losses=(squared_sides(beta=1e-3),), update=adam(lr=5e-7, schedule=constant(warmup=150)))
