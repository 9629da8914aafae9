"""PPO on a reward that is learned from comparisons of episodes."""

from __future__ import annotations

from panoply.methods.base.ppo import ppo
from panoply.regimes import OnPolicy
from panoply.registry import method
from panoply.slots.model.preferred import preferred
from panoply.slots.reward.running import over_deviation
from panoply.slots.reward.signals import blend
from panoply.slots.sample.annotated import annotated

CONTROL = {
    "sample.prompts": 32,
    "credit.gamma": 0.99,
    "update.lr": 1e-3,
    "update.epsilon": 1e-5,
    "update.clip": 0.5,
    "update.epochs": 10,
    "update.minibatches": 4,
    "models.critic.update": None,
    "models.critic.loss.weight": 1.0,
    "models.critic.loss.clip": None,
    "run.steps": 40,
    "run.evaluate_every": 5,
}
"""PPO's, on whole episodes."""


@method("preference-ppo@1", base="ppo", world="cartpole", presets={"control": CONTROL})
def preference_ppo() -> OnPolicy:
    """Reinforcement learning from human preferences (arXiv 1706.03741) with PPO: a reward of steps, fitted as one goes.

    P(ξ ≻ ξ′) = σ(Σ_t r(s_t, a_t) − Σ_t r(s′_t, a′_t)). Annotators compare episodes of every step, whole ones and not
    pieces; one network (the paper has several) is fitted to the latest answers, and PPO learns on what it says, divided
    by the running deviation of returns. The world's own reward is not looked at. Preferences that go round in a circle
    have no such reward, and it settles on one all the same.
    """
    base = ppo()
    return base.but(
        sample=annotated(prompts=32, group=1, opponents=10, against="batch"),
        reward=over_deviation(reward=blend(names=("preferred",))),
        models=(*base.models, preferred()),
    )
