"""What is kept: parts that mark the decisions worth learning from."""

from __future__ import annotations

from torch import Tensor

from panoply.experience import Experience
from panoply.parts import part
from panoply.slots.credit.groups import episode_returns


@part("select", equation="groups with differing returns")
def varied_groups(experience: Experience) -> Tensor:
    """Keep groups whose episodes did not all earn the same; the others carry no relative credit."""
    returns, groups = episode_returns(experience)
    varied = groups.rows(~groups.constant(returns))
    return experience.by("episode").rows(varied)
