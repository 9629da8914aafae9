"""Steps of environments that go on from one batch to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from panoply.experience import Experience
from panoply.parts import part

if TYPE_CHECKING:
    from panoply.rollout.control import ControlCollector


@part(
    "sample",
    equation="{length} steps of {envs} environments",
    needs={"world:step"},
    cost=lambda held, of: (held.envs * held.length, held.envs * held.length),
    bounds={"envs": "at least 1", "length": "at least 1", "temperature": "above 0"},
)
def rollout(
    collect: ControlCollector, *, envs: int = 8, length: int = 256, temperature: float = 1.0
) -> Experience:
    """So many steps in each of some environments. Episodes stay open over the end of a batch and go on in the next.

    What a cut-off or truncated episode would still have earned is estimated by a critic (credit.gae), so this wants
    one; credit that compares whole episodes wants `sample.groups`.
    """
    return collect.rollout(envs, length, temperature)
