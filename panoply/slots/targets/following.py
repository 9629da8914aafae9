"""How target networks follow those they are copies of."""

from __future__ import annotations

import torch
from torch import Tensor

from panoply.parts import part


@part(
    "targets",
    equation="θ′ ← θ′ + {tau}·(θ − θ′)",
    bounds={"tau": "from 0 to 1", "every": "at least 1"},
)
def polyak(
    updates: int, targets: list[Tensor], sources: list[Tensor], *, tau: float = 0.005, every: int = 1
) -> None:
    """A step towards the network after every update, or after each of `every`; tau=1 copies it (DQN)."""
    if updates % every == 0 and targets:
        with torch.no_grad():
            torch._foreach_lerp_(targets, sources, tau)
