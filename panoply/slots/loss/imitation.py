"""Losses of imitation."""

from __future__ import annotations

from panoply.batch import Batch, Values
from panoply.parts import Part, part


@part("loss", equation="−log π", stream="imitation", bounds={"weight": "above 0"})
def nll(batch: Batch, *, weight: float | Part = 1.0) -> Values:
    """Negative log-likelihood of the demonstrated decision."""
    return -batch.now["logp"], {"nll": -batch.now["logp"].detach()}
