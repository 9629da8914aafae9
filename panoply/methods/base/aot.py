"""Alignment via optimal transport, with pairs and without."""

from __future__ import annotations

from panoply.methods.base.dpo import dpo
from panoply.regimes import Dataset
from panoply.registry import method
from panoply.slots.loss.transport import sorted_gaps, sorted_sides


@method(
    "aot@1",
    base="dpo",
    published={"arXiv 2406.05882, figure 2": {"losses.sorted_gaps.beta": 0.01}},
)
def aot() -> Dataset:
    """Alignment via optimal transport, AOT (arXiv 2406.05882), on pairs.

    The policy's gaps between chosen and rejected answers must dominate the reference's as a distribution: both are
    sorted over the mini-batch and compared rank by rank. The larger the mini-batch, the better the estimate.
    """
    return dpo().but(losses=(sorted_gaps(beta=0.01),))


@method(
    "aot-unpaired@1",
    base="aot",
    published={"arXiv 2406.05882, figure 2": {"losses.sorted_sides.beta": 0.01}},
)
def aot_unpaired() -> Dataset:
    """AOT without pairs (arXiv 2406.05882): scores of all chosen answers must dominate those of all rejected ones."""
    return aot().but(losses=(sorted_sides(beta=0.01),))
