"""What the tests of single methods share: pairs, labels and a loop over episodes, written the slow way."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from kit import Slow, ragged, rows_of, values_of
from torch import Tensor

from panoply.experience import Experience, Table

PAIRS = ((100, 102), (104, 103), (106, 109))
ZERO = torch.zeros((), dtype=torch.float64)


def paired(pairs: Sequence[tuple[int, int]] = PAIRS) -> Experience:
    """Random experience with the pairs above; no episode is on two sides."""
    chosen, rejected = (torch.tensor(side) for side in zip(*pairs, strict=True))
    return ragged().with_pairs(Table({"chosen": chosen, "rejected": rejected}))


def total(made: Experience, slow: Slow, episode: int, against: str | None = None) -> Tensor:
    """Σ log π, or Σ log π/π_against, of one episode."""
    rows = rows_of(made, episode=episode)
    scores = [slow.logp(r["state"], r["action"]) - (r[against] if against else 0.0) for r in rows]
    return sum(scores, ZERO)


def length(made: Experience, episode: int) -> int:
    return len(rows_of(made, episode=episode))


def over_pairs(loss: Callable[[int, int], Tensor], pairs: Sequence[tuple[int, int]] = PAIRS) -> Tensor:
    return sum((loss(winner, loser) for winner, loser in pairs), ZERO) / len(pairs)


def returns_of(made: Experience) -> dict[int, float]:
    return {e: sum(r["reward"] for r in rows_of(made, episode=e)) for e in values_of(made, "episode")}


def groups_of(made: Experience) -> list[list[int]]:
    """The episodes of each group."""
    return [sorted({r["episode"] for r in rows_of(made, group=g)}) for g in values_of(made, "group")]


def standardised(made: Experience, epsilon: float = 1e-4) -> dict[int, float]:
    """GRPO's advantage of each episode."""
    returns, found = returns_of(made), {}
    for members in groups_of(made):
        inside = [returns[e] for e in members]
        for e in members:
            spread = statistics.stdev(inside) if len(set(inside)) > 1 else 1.0
            found[e] = (returns[e] - statistics.fmean(inside)) / (spread + epsilon)
    return found
