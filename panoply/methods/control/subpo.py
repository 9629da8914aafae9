"""Submodular reinforcement learning."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.evidence.claims import Ranks
from panoply.experience import Experience, Segments
from panoply.methods.base.reinforce import reinforce
from panoply.parts import part
from panoply.regimes import OnPolicy
from panoply.registry import method
from panoply.slots.credit.returns import place, to_go
from panoply.slots.regularise.terms import entropy
from panoply.slots.reward.signals import signal
from panoply.slots.sample.groups import groups
from panoply.slots.update.optimisers import adam


def _equation(held: Any) -> str:
    baseline = " − mean of the other episodes at the same turn" if held.baseline == "turn" else ""
    return f"A = Σ_j≥i F(s_j+1|τ_0:j){baseline}" + (", over its deviation" if held.normalise else "")


@part("credit", equation=_equation)
def future_gains(
    experience: Experience,
    *,
    baseline: Literal["turn", "none"] = "turn",
    normalise: bool = True,
    epsilon: float = 1e-8,
) -> Tensor:
    """What a decision and those after it add to the set, less what others add from the same turn on.

    Rewards are marginal gains, so their sum from a decision on is F(τ) − F(what was seen before it): what is there
    already is neither credited nor blamed. Other episodes only are in the baseline, which keeps the gradient unbiased;
    where there is none, it is 0. The deviation is one number for the batch.
    """
    gains = to_go(experience, experience["reward"].float())
    if baseline == "turn":
        turns = Segments(place(experience))
        others = turns.rows(turns.sum(gains)) - gains
        gains = gains - others / (turns.rows(turns.count) - 1).clamp(min=1)
    if not normalise or bool((gains == 0).all()):
        return gains
    return gains / (torch.sqrt((gains**2).mean()) + epsilon)


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
        credit=future_gains(),
        regularise=(entropy(weight=0.0),),
        update=adam(lr=1e-2),
    )
