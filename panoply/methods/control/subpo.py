"""Submodular reinforcement learning."""

from __future__ import annotations

from panoply.evidence.claims import Ranks
from panoply.methods.base.a2c import a2c
from panoply.methods.base.ppo import CONTROL as PPO_CONTROL
from panoply.methods.base.ppo import ppo
from panoply.methods.base.reinforce import reinforce
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.returns import over_others
from panoply.slots.regularise.terms import entropy
from panoply.slots.reward.signals import signal
from panoply.slots.sample.groups import groups
from panoply.slots.update.optimisers import adam

GRID = {
    "sample.prompts": 32,
    "update.lr": 3e-3,
    "update.clip": 0.0,
    "run.steps": 200,
    "run.held_out": 64,
    "policy.hidden": (64, 32),
}
"""The card's network. Smaller batches and more of them, for a smaller grid."""
WITH_CRITIC = {
    "sample.envs": 32,
    "sample.length": 30,
    "update.lr": 3e-3,
    "run.held_out": 64,
    "policy.hidden": (64, 32),
}
"""As much experience a step as the grid's batches have, in steps of environments that go on."""
GROUND = {
    "world.layout": "open",
    "world.size": 10,
    "world.counts": (0,),
    "world.reward": "coverage",
    "world.view": "vector",
    "world.clock": True,
    "world.level": 0,
    "world.horizon": 30,
}
"""10 × 10 cells with a peak in the middle, 30 steps from one start."""
CLAIM = Ranks(
    "Paid for what a step adds to the ground covered, a policy covers more of it than one that is paid for every state "
    "by what it covers alone; one that sees what is covered covers more still.",
    order=("history=subpo:world.history=true", "", "modular=subpo:reward.name=alone"),
    world="grid",
    budget="episodes=3200",
    metric="success",
    settings={**GROUND, "run.held_out": 100},
    tune={"update.lr": (1e-3, 3e-3, 1e-2)},
    best=1.0,
)


PUBLISHED: Published = {
    "arXiv 2307.13372, released code": {
        "sample.prompts": 500,
        "update.lr": 1e-2,
        "regularise.entropy.weight": 0.0,
        "grid:policy.hidden": (64, 32),
    }
}


@method(
    "subpo@1",
    paper=149,
    base="reinforce",
    world="grid",
    presets={"grid": GRID},
    claim=CLAIM,
    published=PUBLISHED,
)
def subpo() -> OnPolicy:
    """Submodular policy optimization (arXiv 2307.13372). ∇J = E[Σ_i ∇log π(a_i)·(Σ_j≥i F(s_j+1|τ_0:j) − b)].

    What an episode is worth is a set function F of the states it visited, in which a state adds less the more is there
    already. Rewards are its marginal gains: ground newly covered (the signal `covered` of the world `grid`), or a
    reward part `covering`, `information` or `capped_counts` on what is observed. The policy may be Markov, seeing
    place and time, or see the history (`world.history`); a Markov critic would be biased here, and there is none
    (`subpo-a2c` and `subpo-ppo` have one, as the paper's large experiments do). The released tabular script weighs
    decisions by the value of the prefix instead of by what is still to come.
    """
    return reinforce().but(
        sample=groups(prompts=500, group=1),
        reward=signal(name="covered"),
        credit=over_others(),
        regularise=(entropy(weight=0.0),),
        update=adam(lr=1e-2),
    )


@method(
    "subpo-a2c@1", paper=149, base="a2c", world="grid", presets={"grid": {**WITH_CRITIC, "run.steps": 400}}
)
def subpo_a2c() -> OnPolicy:
    """Submodular policy optimization on A2C (arXiv 2307.13372): marginal gains as rewards, and a critic beside.

    What a state adds depends on what was visited before, so a critic that sees the state alone is biased; let it see
    the history (`world.history`), or take it for the baseline that it is.
    """
    return a2c().but(reward=signal(name="covered"))


@method(
    "subpo-ppo@1",
    paper=149,
    base="ppo",
    world="grid",
    presets={"grid": {**PPO_CONTROL, **WITH_CRITIC, "update.minibatches": 4, "run.steps": 100}},
)
def subpo_ppo() -> OnPolicy:
    """Submodular policy optimization on PPO (arXiv 2307.13372): marginal gains as rewards, GAE with a critic.

    As with `subpo-a2c`, the critic is unbiased only where it sees the history (`world.history`).
    """
    return ppo().but(reward=signal(name="covered"))
