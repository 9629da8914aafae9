"""How well rewards tell what answers are really worth, on the answers that a filter keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from panoply.errors import PanoplyError


def r_squared(reward: Tensor, worth: Tensor, bins: int = 0) -> float:
    """R² = 1 − Σ(q − fit)²/Σ(q − mean)² of the line through (reward r, true worth q): 1 where r tells q.

    bins: so many groups of equal size by reward, whose means are fitted in place of single answers; 0 takes answers
    """
    if len(reward) != len(worth) or len(reward) < 3:
        raise PanoplyError(f"R² needs at least 3 answers, each with a reward and a worth, not {len(reward)}.")
    r, q = reward.double(), worth.double()
    if bins:
        if not 3 <= bins <= len(r):
            raise PanoplyError(f"R² needs from 3 to {len(r)} bins of {len(r)} answers, not {bins}.")
        order = r.argsort(stable=True)
        r, q = (torch.stack([part.mean() for part in x[order].tensor_split(bins)]) for x in (r, q))
    r, q = r - r.mean(), q - q.mean()
    total = float((q**2).sum())
    if total == 0 or float((r**2).sum()) == 0:
        return 0.0
    slope = (r * q).sum() / (r**2).sum()
    return 1 - float(((q - slope * r) ** 2).sum()) / total
