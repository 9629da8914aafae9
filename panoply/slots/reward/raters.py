"""What one who judges whole episodes goes by: numbers that are no sum of what single steps are worth.

A rater is a reward, and what an episode is worth to it is the sum of that (`sample.annotated`). `reward.signal` makes
one who goes by the return; those below are not Markov, or look at what was seen.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from panoply.experience import Experience
from panoply.parts import Finding, Part, part
from panoply.slots.reward.signals import signal

_RETURN = signal(name="reward")


@part("reward", equation=lambda held: f"max_t of {held.reward.equation()}, on the last decision")
def peak(experience: Experience, *, reward: Part = _RETURN) -> Tensor:
    """The most that one step of an episode earned: a single great moment is worth as much as many."""
    episodes = experience.by("episode")
    return episodes.rows(episodes.max(reward(experience).float())) * episodes.is_last()


def _beyond(held: Any, method: Any, world: Any) -> list[Finding]:
    """A number that is not seen."""
    size = math.prod(world.observation.shape) if world.observation.shape else 0
    if held.dim >= size:
        return [
            ("dim", f"{size} numbers are seen in {world.name}" if size else "only a state's name is seen")
        ]
    return []


@part(
    "reward",
    equation="{sign}·(number {dim} of what is seen)",
    needs={"world:control"},
    bounds={"dim": "at least 0", "sign": "any number"},
    impossible=_beyond,
)
def seen(experience: Experience, *, dim: int = 0, sign: float = 1.0) -> Tensor:
    """One number of the observation in which a decision was taken, times `sign`: a taste rather than a task."""
    return sign * _seen(experience, dim)


def _spared_impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    if held.low >= held.high:
        return [("high", f"a zone ends above where it begins ({held.low:g})")]
    return _beyond(held, method, world)


@part(
    "reward",
    equation=lambda held: (
        f"{held.reward.equation()}, less {held.penalty:g} if more than {held.most:g} of the time was in the zone"
    ),
    needs={"world:control"},
    bounds={
        "dim": "at least 0",
        "low": "any number",
        "high": "any number",
        "most": "from 0 up to 1",
        "penalty": "above 0",
    },
    impossible=_spared_impossible,
)
def spared(
    experience: Experience,
    *,
    reward: Part = _RETURN,
    dim: int = 0,
    low: float = 0.0,
    high: float = 1.0,
    most: float = 0.6,
    penalty: float = 1000.0,
) -> Tensor:
    """A reward, and on the last decision a penalty for episodes that were in a zone for more than a share of the time.

    No reward of single states says the same: the first steps in the zone are harmless, and so is every one of them.

    dim, low, high   the zone: where that number of the observation is between the two
    """
    earned: Tensor = reward(experience).float()
    where = _seen(experience, dim)
    episodes = experience.by("episode")
    share = episodes.mean(((where >= low) & (where < high)).float())
    return earned - penalty * episodes.rows((share > most).float()) * episodes.is_last()


def _seen(experience: Experience, dim: int) -> Tensor:
    numbers = experience.context.tensor("observation").flatten(1)
    found: Tensor = numbers[:, dim].float()[experience["context"]]
    return found
