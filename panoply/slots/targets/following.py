"""How target networks follow those they are copies of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from panoply.parts import part

Pairs = Mapping[str, tuple[list[Tensor], list[Tensor]]]
"""Of each target by name, its weights and those it follows."""


@part(
    "targets",
    equation="θ′ ← θ′ + {tau}·(θ − θ′)",
    bounds={"tau": "from 0 to 1", "every": "at least 1"},
)
def polyak(updates: int, pairs: Pairs, *, tau: float = 0.005, every: int = 1) -> None:
    """A step towards the network after every update, or after each of `every`; tau=1 copies it (DQN)."""
    if updates % every == 0:
        with torch.no_grad():
            for targets, sources in pairs.values():
                torch._foreach_lerp_(targets, sources, tau)
