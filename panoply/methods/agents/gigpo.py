"""Group-in-Group Policy Optimization."""

from __future__ import annotations

from panoply.evidence.claims import Learns
from panoply.methods.base.grpo import TINY, grpo
from panoply.regimes import OnPolicy
from panoply.registry import method
from panoply.slots.credit.anchors import episode_and_anchor
from panoply.slots.regularise.terms import kl
from panoply.slots.sample.groups import groups

CLAIM = Learns(
    "In a world whose states recur, credit for steps beside credit for episodes learns more from as many episodes.",
    over="grpo",
    world="keydoor",
    budget="episodes=2560",
    settings={"run.evaluate_every": 4},
)


@method("gigpo@1", paper=81, base="grpo", world="keydoor", presets={"tiny": TINY}, claim=CLAIM)
def gigpo(omega: float = 1.0, gamma: float = 0.95) -> OnPolicy:
    """Group-in-Group Policy Optimization (arXiv 2505.10978).

    Clones of one task pass through the same states. Beside an episode's return against its group's, a turn gets its
    discounted return against those of all turns that were taken in the same state: credit for single steps without a
    critic and without more rollouts. The loss is GRPO's.
    """
    return grpo().but(
        sample=groups(prompts=16, group=8),
        credit=episode_and_anchor(omega=omega, gamma=gamma),
        regularise=(kl(weight=0.01, estimator="k3"),),
    )
