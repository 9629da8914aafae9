"""Losses that compare pairs as a distribution: sorted, and the best of one side against the best of the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.parts import Part, part
from panoply.slots.loss.pairs import episode_scores, pair_stats

BOUNDS = {"weight": "above 0", "beta": "above 0", "smoothing": "from 0 to 1"}


def _facing(mine: Tensor, theirs: Tensor) -> Tensor:
    """Of each value of `mine` the one of `theirs` that has the same rank."""
    return theirs.sort().values[mine.argsort().argsort()]


def _keys(batch: Batch) -> Tensor:
    """Two numbers that name each pair."""
    return torch.stack([batch.pairs.tensor("chosen"), batch.pairs.tensor("rejected")], 1)


def _found(batch: Batch, prepared: dict[str, Tensor], name: str) -> Tensor:
    """A column of all pairs of the mini-batch, for those that this batch holds."""
    same = (_keys(batch)[:, None] == prepared["pairs"][None]).all(-1)
    return prepared[name][same.int().argmax(1)]


def _smoothed(margin: Tensor, smoothing: float) -> Tensor:
    return -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin)


def _gaps(batch: Batch, to: str) -> tuple[Tensor, Tensor]:
    """log π(chosen) − log π(rejected) of each pair, and the same of the reference."""
    won, lost = batch.pair_rows(episode_scores(batch, None))
    ahead, behind = batch.pair_rows(episode_scores(batch, to))
    return won - lost, (won - ahead) - (lost - behind)


def _facing_gaps(batch: Batch, *, to: str, **settings: Any) -> dict[str, Tensor]:
    gap, reference = _gaps(batch, to)
    return {"pairs": _keys(batch), "reference": _facing(gap, reference)}


def _needs(held: Any) -> frozenset[str]:
    return frozenset({f"logp@{held.to}"})


@part(
    "loss",
    equation="−log σ({beta}·(g_(i) − g^{to}_(i))),  g = log π(chosen) − log π(rejected), sorted",
    unit="pair",
    stream="imitation",
    needs=_needs,
    bounds=BOUNDS,
    prepare=_facing_gaps,
)
def sorted_gaps(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.1,
    smoothing: float = 0.0,
    to: str = "reference",
) -> Values:
    """AOT on pairs (arXiv 2406.05882): the policy's gaps must dominate the reference's as a distribution.

    Not pair by pair: the i-th smallest gap of the mini-batch is compared with the reference's i-th smallest.
    """
    gap, reference = _gaps(batch, to)
    margin = beta * (gap - _found(batch, batch.prepared["sorted_gaps"], "reference").to(gap))
    chosen, rejected = batch.pair_rows(episode_scores(batch, to))
    return _smoothed(margin, smoothing), pair_stats(beta * (gap - reference), chosen, rejected)


def _facing_sides(batch: Batch, *, to: str, **settings: Any) -> dict[str, Tensor]:
    chosen, rejected = batch.pair_rows(episode_scores(batch, to))
    return {"pairs": _keys(batch), "chosen": _facing(rejected, chosen), "rejected": _facing(chosen, rejected)}


@part(
    "loss",
    equation="−log σ({beta}·(ℓ_chosen,(i) − ℓ_rejected,(i))),  ℓ = Σ log π/π_{to}, sorted",
    unit="pair",
    stream="imitation",
    needs=_needs,
    bounds=BOUNDS,
    prepare=_facing_sides,
)
def sorted_sides(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.1,
    smoothing: float = 0.0,
    to: str = "reference",
) -> Values:
    """AOT without pairs (arXiv 2406.05882): scores of all chosen answers must dominate those of all rejected ones.

    Each side is compared with the answer of its own rank on the other; which those are is settled on the whole
    mini-batch, so that a pair may be cut off from the answer that its side is compared with.
    """
    chosen, rejected = batch.pair_rows(episode_scores(batch, to))
    facing = batch.prepared["sorted_sides"]
    mine = _smoothed(beta * (chosen - _found(batch, facing, "rejected").to(chosen)), smoothing)
    theirs = _smoothed(beta * (_found(batch, facing, "chosen").to(rejected) - rejected), smoothing)
    return mine + theirs - theirs.detach(), pair_stats(beta * (chosen - rejected), chosen, rejected)
