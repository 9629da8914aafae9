"""Terms of every unit, made so that a unit cut in two would give another number, and pairs to cut."""

from __future__ import annotations

import torch

from panoply.batch import Batch, Values
from panoply.experience import Experience, Table
from panoply.parts import Part, part


@part("loss", unit="episode")
def toy_episode(batch: Batch) -> Values:
    """Nonlinear in an episode's log-probability: a cut episode would give another number."""
    return batch.by("episode").sum(batch.now["logp"]) ** 2, {}


@part("loss", unit="turn")
def toy_turn(batch: Batch) -> Values:
    return batch.by("turn").sum(batch.now["logp"]) ** 2, {}


@part("loss", unit="group")
def toy_group(batch: Batch) -> Values:
    return batch.by("group").sum(batch.now["logp"]) ** 2, {}


@part("loss", prepare=lambda batch, weight: {"mean": batch.now["logp"].mean(), "rows": len(batch.experience)})
def toy_prepared(batch: Batch, *, weight: float | Part = 1.0) -> Values:
    """Squared distance to the mini-batch's mean, which is a number and not differentiated."""
    return (batch.now["logp"] - batch.prepared["toy_prepared"]["mean"]) ** 2, {}


PAIRS = [(100, 101), (103, 104), (104, 100), (106, 107)]


def with_pairs(experience: Experience) -> Experience:
    chosen, rejected = zip(*PAIRS, strict=True)
    return experience.with_pairs(Table({"chosen": torch.tensor(chosen), "rejected": torch.tensor(rejected)}))
