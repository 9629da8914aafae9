"""How far a mean that was measured may lie from the true one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

RESAMPLES = 2000


def wilson(rate: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """A 95 % interval for a rate seen in n trials that does not leave [0, 1] (Wilson 1927)."""
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(values: Tensor, level: float = 0.95) -> tuple[float, float]:
    """A percentile interval of the mean (Efron 1979). Of a single value it is that value."""
    import torch

    from panoply.seeds import torch_rng

    rows = torch.randint(len(values), (RESAMPLES, len(values)), generator=torch_rng("bootstrap", len(values)))
    means = values[rows].mean(1).sort().values
    tail = (1 - level) / 2
    return float(means[math.floor(tail * RESAMPLES)]), float(means[math.ceil((1 - tail) * RESAMPLES) - 1])
