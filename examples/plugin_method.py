"""A method of your own: panoply train rank-grpo --plugin examples/plugin_method.py"""

from torch import Tensor

import panoply as pp
from panoply.methods.base.grpo import TINY, grpo
from panoply.slots.credit.groups import episode_returns


@pp.part("credit", equation="A = share of the group beaten − share that beats it")
def group_rank(experience: pp.Experience, *, scale: float = 1.0) -> Tensor:
    """An episode's rank in its group, from −1 to 1: only the order of returns counts, not their size."""
    returns, groups = episode_returns(experience)
    same = groups.index[:, None] == groups.index[None, :]
    beaten = ((returns[:, None] - returns[None, :]).sign() * same).sum(1)
    others = (groups.rows(groups.count) - 1).clamp(min=1)
    return experience.by("episode").rows(scale * beaten / others)


@pp.method("rank-grpo@1", base="grpo", presets={"tiny": TINY})
def rank_grpo(scale: float = 1.0) -> pp.OnPolicy:
    """GRPO with ranks for credit: no standard deviation to divide by, and no outlier to fear."""
    return grpo().but(credit=group_rank(scale=scale))
