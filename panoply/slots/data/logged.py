"""Data that was logged by others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from panoply.experience import Experience
from panoply.parts import part

if TYPE_CHECKING:
    from panoply.rollout.control import ControlCollector


@part("data", equation="the world's logged data", needs={"world:data"}, cost=lambda held, of: (0, 0))
def logged(collect: ControlCollector) -> Experience:
    """All of it (`--world logged:WORLD-MIX`), at every step: batches are the learner's matter."""
    return collect.logged()
