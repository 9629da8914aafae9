"""What is kept: parts that mark the decisions worth learning from."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from panoply.experience import TRUNCATED, Experience
from panoply.parts import part
from panoply.slots.credit.groups import episode_returns


def _varied_needs(held: Any) -> frozenset[str]:
    return frozenset({"world:verify", f"signal:{held.name}"}) if held.name else frozenset()


@part(
    "select",
    equation=lambda held: f"groups with differing {held.name or 'returns'}",
    needs=_varied_needs,
)
def varied_groups(experience: Experience, *, name: str | None = None) -> Tensor:
    """Keep groups whose episodes did not all earn the same; the others carry no relative credit.

    name: the signal that must differ, where the reward adds differences of its own
    """
    returns, groups = episode_returns(experience)
    if name:
        returns = experience.by("episode").sum(experience[f"signal:{name}"])
    varied = groups.rows(~groups.constant(returns))
    return experience.by("episode").rows(varied)


@part("select", equation="truncated episodes do not learn")
def overlong_filter(experience: Experience) -> Experience:
    """Episodes that were cut off are compared with, and teach nothing themselves (overlong filtering).

    A cut-off answer is wrong for its length and not for its thought. It stays in its group's mean and deviation; its
    decisions are in no sum and in no count.
    """
    episodes = experience.by("episode")
    learns = episodes.rows(episodes.max(experience["end"]) != TRUNCATED)
    return experience.with_columns(train=learns & experience["train"] if "train" in experience else learns)
