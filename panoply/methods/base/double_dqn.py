"""Double deep Q-learning."""

from __future__ import annotations

from panoply.methods.base.dqn import dqn
from panoply.regimes import OffPolicy
from panoply.registry import Published, method
from panoply.slots.loss.bellman import q_learning

PUBLISHED: Published = {
    "arXiv 1509.06461": {
        "losses.q_learning.double": True,
        "replay.batch": 32,
        "replay.gamma": 0.99,
        "replay.every": 4,
        "targets.every": 10000,
    },
}


@method(
    "double-dqn@1",
    base="dqn",
    world="cartpole",
    published=PUBLISHED,
)
def double_dqn() -> OffPolicy:
    """Double DQN (arXiv 1509.06461): the policy chooses the next action and the target values it, so that noise is not
    taken for worth."""
    return dqn().but(losses=q_learning(double=True))
