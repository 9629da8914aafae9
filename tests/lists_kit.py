"""Lists of answers for tests: written out, or of random experience with a slow reference for their gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from kit import Slow, hand, ragged, rows_of
from torch import Tensor
from toys import LISTS

from panoply.batch import Batch
from panoply.experience import Experience, Ragged, Table

WORTH = [[2.0, 1.0, 1.0], [0.5, 0.0], [3.0, 2.0, 1.0, 0.0]]


def listed(
    made: Experience, members: Sequence[Sequence[int]] = LISTS, worth: Sequence[Sequence[float]] = WORTH
) -> Experience:
    """The same episodes in these lists, which are worth so much."""
    columns = {"episodes": Ragged.from_lists(members), "worth": Ragged.from_lists(worth, torch.float64)}
    return made.with_lists(Table(columns))


def flat(worth: Sequence[Sequence[float]], logp: Tensor, **columns: Tensor) -> Batch:
    """A batch of lists of answers of one token each, one after another, with these log-probabilities.

    columns: of snapshots by their names, `behaviour` among them
    """
    ends = [0]
    for row in worth:
        ends.append(ends[-1] + len(row))
    members = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
    named = {"logp" if name == "behaviour" else f"logp@{name}": column for name, column in columns.items()}
    return Batch(listed(hand(action=[0] * ends[-1], **named), members, worth), {"logp": logp})


@dataclass(frozen=True)
class Answers:
    """A list's members: Σ log π of each, the same by the reference and by who wrote it, and what it is worth."""

    own: list[Tensor]
    reference: list[float]
    wrote: list[float]
    worth: list[float]

    def scores(self, beta: float) -> list[Tensor]:
        return [beta * (own - then) for own, then in zip(self.own, self.reference, strict=True)]


def slow_gradient(loss: Callable[[Answers], Tensor]) -> tuple[Experience, Tensor]:
    """Random lists, and the gradient of the mean of a loss over them."""
    made, table = listed(ragged()), Slow()
    total = torch.zeros((), dtype=torch.float64)
    for members, worth in zip(LISTS, WORTH, strict=True):
        rows = [rows_of(made, episode=episode) for episode in members]
        own = [torch.stack([table.logp(r["state"], r["action"]) for r in each]).sum() for each in rows]
        reference, wrote = ([sum(r[c] for r in each) for each in rows] for c in ("logp@reference", "logp"))
        total = total + loss(Answers(own, reference, wrote, worth)) / len(LISTS)
    return made, table.gradient(total)
