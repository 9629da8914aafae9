"""Presets with room: named settings of a world on which a baseline was seen to learn, neither stuck nor finished.

`--world chain:wall` is the world `chain` with the settings of its preset `wall`; any other setting goes over them.
`python benchmarks/presets.py` measures the curves of their baselines, which docs/worlds.md shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A named value of a world's settings, and what is known about it.

    settings   of the world, by name
    use        what it is for
    start      held-out success before training
    ceiling    the best that is known; of success 1
    baseline   the arm whose curve is shown, and its budget
    """

    settings: Mapping[str, Any] = field(hash=False)
    use: str
    start: float
    ceiling: float = 1.0
    baseline: str = "grpo"
    budget: str = "steps=60"
