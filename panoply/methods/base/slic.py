"""Sequence likelihood calibration."""

from __future__ import annotations

from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.loss.pairs import chosen_nll, hinge

PUBLISHED: Published = {
    "arXiv 2305.10425, §3.2": {
        "losses.hinge.margin": 1.0,
        "losses.hinge.to": None,
        "losses.chosen_nll.weight": 0.5,
    },
}


@method("slic@1", base="dpo", published=PUBLISHED)
def slic() -> Dataset:
    """Sequence likelihood calibration, SLiC-HF (arXiv 2305.10425).

    max(0, δ − log π(chosen) + log π(rejected)) − λ·log π(y_ref): no reference model at all, and a pair that is ranked
    right by δ is left alone. y_ref is the answer imitated before; here it is the chosen one.
    """
    return dpo().but(losses=(hinge(beta=1.0, margin=1.0, to=None), chosen_nll(weight=0.5)))
