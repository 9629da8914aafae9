"""Submodular reinforcement learning."""

from __future__ import annotations

from panoply.evidence.claims import Ranks
from panoply.methods.base.reinforce import reinforce
from panoply.regimes import OnPolicy
from panoply.registry import method
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
    settings={**GROUND, "run.evaluate_every": 20},
    tune={"update.lr": (1e-3, 3e-3, 1e-2)},
)


@method("subpo@1", paper=149, base="reinforce", world="grid", presets={"grid": GRID}, claim=CLAIM)
def subpo() -> OnPolicy:
    """Submodular policy optimization (arXiv 2307.13372). ∇J = E[Σ_i ∇log π(a_i)·(Σ_j≥i F(s_j+1|τ_0:j) − b)].

    What an episode is worth is a set function F of the states it visited, in which a state adds less the more is there
    already. Rewards are its marginal gains: ground newly covered (the signal `covered` of the world `grid`), or a
    reward part `covering`, `information` or `capped_counts` on what is observed. The policy may be Markov, seeing
    place and time, or see the history (`world.history`); a Markov critic would be biased here, and there is none. The
    released tabular script weighs decisions by the value of the prefix instead of by what is still to come.
    """
    return reinforce().but(
        sample=groups(prompts=500, group=1),
        reward=signal(name="covered"),
        credit=over_others(),
        regularise=(entropy(weight=0.0),),
        update=adam(lr=1e-2),
    )
