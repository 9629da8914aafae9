"""Terms of every unit, made so that a unit cut in two would give another number, and pairs to cut."""

from __future__ import annotations

import torch

from panoply.batch import Batch, Values
from panoply.experience import KEY_UNITS, Experience, Ragged, Table, Unit
from panoply.parts import Part, part


def toy_of(unit: Unit) -> Part:
    """Nonlinear in a unit's log-probability: one that is cut would give another number."""

    def squared(batch: Batch) -> Values:
        logp = batch.now["logp"]
        return (logp.sum()[None] if unit == "batch" else batch.by(unit).sum(logp)) ** 2, {}

    squared.__name__ = f"toy_{unit}"
    return part("loss", unit=unit)(squared)()


TOYS = {unit: toy_of(unit) for unit in (*KEY_UNITS, "batch")}


@part("loss", unit="list")
def toy_list(batch: Batch) -> Values:
    """The squared sum over a list's episodes of place times log-probability."""
    scores = batch.list_rows(batch.by("episode").sum(batch.now["logp"]), 0.0)
    return (scores * torch.arange(1, 1 + scores.shape[1])).sum(1) ** 2, {}


@part("loss", prepare=lambda batch, weight: {"mean": batch.now["logp"].mean(), "rows": len(batch.experience)})
def toy_prepared(batch: Batch, *, weight: float | Part = 1.0) -> Values:
    """Squared distance to the mini-batch's mean, which is a number and not differentiated."""
    return (batch.now["logp"] - batch.prepared["toy_prepared"]["mean"]) ** 2, {}


PAIRS = [(100, 101), (103, 104), (104, 100), (106, 107)]


def with_pairs(experience: Experience) -> Experience:
    chosen, rejected = zip(*PAIRS, strict=True)
    return experience.with_pairs(Table({"chosen": torch.tensor(chosen), "rejected": torch.tensor(rejected)}))


LISTS = [[102, 100, 101], [107, 104], [109, 106, 105, 108]]


def with_lists(experience: Experience) -> Experience:
    """Lists of unequal length, across groups."""
    return experience.with_lists(Table({"episodes": Ragged.from_lists(LISTS)}))


def with_keys(experience: Experience) -> Experience:
    """Every key there is: two games a group, three tasks, two domains and agents that cross all of them."""
    episode, turn = experience["episode"], experience["turn"]
    return experience.with_columns(
        segment=turn // 2, parent=episode // 4, game=episode // 2, step=turn,
        task=episode % 3, domain=experience["group"] // 2, agent=(episode % 5) // 3,
    )  # fmt: skip
