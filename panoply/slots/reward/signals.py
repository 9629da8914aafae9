"""Rewards made of the signals a world gives."""

from __future__ import annotations

from torch import Tensor

from panoply.experience import Experience
from panoply.parts import part


@part("reward", equation="{name}", needs={"world:verify"})
def signal(experience: Experience, *, name: str = "success", scale: float = 1.0) -> Tensor:
    """One named signal of the world, as it is: `success` is its verifier's verdict."""
    return experience[f"signal:{name}"] * scale
