"""Group-in-Group Policy Optimization."""

from __future__ import annotations

from panoply.evidence.claims import Learns
from panoply.methods.base.grpo import TINY, grpo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.anchors import episode_and_anchor
from panoply.slots.regularise.terms import kl
from panoply.slots.reward.shaping import minus_invalid
from panoply.slots.reward.signals import signal
from panoply.slots.sample.groups import groups

CLAIM = Learns(
    "In a world whose states recur, credit for steps beside credit for episodes learns more from as many episodes.",
    race="keydoor",
    reworded="it held in 5 × 5 cells, where GRPO leaves 17 % of the room; here the ways are longer.",
)


PUBLISHED: Published = {
    "langfengQ/verl-agent, examples/gigpo_trainer/run_alfworld.sh": {
        "sample.prompts": 16,
        "sample.group": 8,
        "reward.penalty": 0.1,
        "credit.omega": 1.0,
        "credit.gamma": 0.95,
        "credit.scale": "std",
        "regularise.kl.weight": 0.01,
        "regularise.kl.estimator": "k3",
        "update.lr": 1e-6,
    },
    "langfengQ/verl-agent, gigpo/core_gigpo.py": {"credit.epsilon": 1e-6},
    "arXiv 2505.10978, §5": {
        "reward.reward.scale": 10.0,
        "sample.temperature": 1.0,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
    },
}


@method(
    "gigpo@1",
    paper=81,
    base="grpo",
    world="keydoor",
    presets={"tiny": {**TINY, "reward": "signal"}},
    claim=CLAIM,
    published=PUBLISHED,
)
def gigpo(omega: float = 1.0, gamma: float = 0.95) -> OnPolicy:
    """Group-in-Group Policy Optimization (arXiv 2505.10978).

    Clones of one task pass through the same states. Beside an episode's return against its group's, a turn gets its
    discounted return against those of all turns that were taken in the same state: credit for single steps without a
    critic and without more rollouts. The loss is GRPO's. A success earns 10, and a turn that could not be done costs
    0.1 (in worlds that do not say which those are, set reward.penalty=0).

    Two turns are in the same state by the world's own word. The released code can also group turns whose observations
    are similar texts: `credit.similarity=0.95`, where prompts are observations and have no history in them. It compares
    characters, and this tokens.
    """
    return grpo().but(
        sample=groups(prompts=16, group=8),
        reward=minus_invalid(reward=signal(scale=10.0), penalty=0.1),
        credit=episode_and_anchor(omega=omega, gamma=gamma),
        regularise=(kl(weight=0.01, estimator="k3"),),
    )
