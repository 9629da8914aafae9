"""Steps of environments that go on from one batch to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from panoply.experience import Experience
from panoply.parts import part
from panoply.selves import LEARNER, acts, by_whom

if TYPE_CHECKING:
    from panoply.rollout.control import ControlCollector


@part(
    "sample",
    equation=lambda held: f"{held.length} steps of {held.envs} environments{by_whom(held.by)}",
    needs=lambda held: acts(held.by) | {"world:step"},
    cost=lambda held, of: (held.envs * held.length, held.envs * held.length),
    bounds={"envs": "at least 1", "length": "at least 1", "temperature": "above 0"},
)
def rollout(
    collect: ControlCollector,
    *,
    envs: int = 8,
    length: int = 256,
    temperature: float = 1.0,
    by: str = LEARNER,
) -> Experience:
    """So many steps in each of some environments. Episodes stay open over the end of a batch and go on in the next.

    What a cut-off or truncated episode would still have earned is estimated by a critic (credit.gae), so this wants
    one; credit that compares whole episodes wants `sample.groups`.

    by: who acts, the policy that learns or another self of it. With `past:1` actors know nothing of the last step of
    learning, as where acting and learning are apart (IMPALA, arXiv 1802.01561)
    """
    with collect.acted_by(by):
        return collect.rollout(envs, length, temperature)
