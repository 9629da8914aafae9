"""A part of your own, used by name: panoply train grpo --select solvable --plugin examples/plugin_part.py"""

from torch import Tensor

import panoply as pp
from panoply.slots.credit.groups import episode_returns


@pp.part("select", equation="groups that succeed at most {most} of the time")
def solvable(experience: pp.Experience, *, most: float = 0.9) -> Tensor:
    """Keep the groups that are not solved yet: a mask over decisions."""
    returns, groups = episode_returns(experience)
    kept = groups.rows(groups.mean(returns) <= most)
    return experience.by("episode").rows(kept)
