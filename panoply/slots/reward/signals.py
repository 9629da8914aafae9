"""Rewards made of the signals a world gives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from panoply.experience import Experience
from panoply.parts import part


def _needs(held: Any) -> frozenset[str]:
    return frozenset({"world:verify", f"signal:{held.name}"})


@part("reward", equation="{name}", needs=_needs, bounds={"scale": "any number"})
def signal(experience: Experience, *, name: str = "success", scale: float = 1.0) -> Tensor:
    """One named signal of the world, as it is: `success` is its verifier's verdict."""
    return experience[f"signal:{name}"] * scale
