"""Normalised policy gradient with implicit gradient transport, and Hessian-aided recursive policy gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from panoply.evidence.claims import Ahead
from panoply.methods.base.reinforce import reinforce
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.returns import over_others
from panoply.slots.reward.signals import signal
from panoply.slots.sample.groups import groups
from panoply.slots.schedule.schedules import decaying
from panoply.slots.update.momentum import momentum

if TYPE_CHECKING:
    from torch import Tensor

    from panoply.worlds.control.mdp import MDP

Correction = Literal["none", "extrapolate", "hessian"]
CORRECTIONS: tuple[Correction, ...] = ("none", "extrapolate", "hessian")
CONTROL = {"sample.prompts": 8, "policy.hidden": (32, 32), "run.steps": 200}
HARPG = {
    **CONTROL,
    "update.lr": 2e-3,
    "update.correction": "hessian",
    "update.normalise": False,
    "update.eta": "decaying",
    "update.eta.power": 1.0,
    "update.schedule": "decaying",
    "update.schedule.power": 0.5,
}
N_HARPG = {**HARPG, "update.lr": 0.1, "update.normalise": True, "update.schedule.power": 1.0}

# ------------------------------------------------------------------ how good the estimates of the gradient are

GAMMA, HORIZON, STEPS, BATCH, MDPS = 0.99, 10, 60, 8, 8


def squared_errors(seed: int, correction: Correction) -> list[float]:
    """‖d_t − ∇J(θ_t)‖² at every step, of a softmax table in a random MDP of five states.

    Each correction gets as many trajectories; with `hessian` half of a step's are taken aside.
    """
    from panoply.loops.learner import Learner
    from panoply.policies.control import ControlPolicy, PolicySpec
    from panoply.rollout.control import ControlCollector
    from panoply.worlds.control.tabular import Tabular

    world = Tabular("random", size=5, actions=3, horizon=HORIZON, seed=seed)
    policy = ControlPolicy.fresh(world.observation, world.action, PolicySpec(hidden=()), seed)
    made = n_pg_igt().but(
        sample=groups(prompts=BATCH // 2 if correction == "hessian" else BATCH, group=1),
        reward=signal(name="reward"),
        update=n_pg_igt().update.but(lr=0.5, correction=correction),
    )
    learner = Learner(policy, made, total_steps=STEPS, micro_tokens=10**9, seed=seed)
    collect = ControlCollector(world, policy, seed)
    (weights,) = learner.parameters.values()
    found = []
    for step in range(STEPS):
        taken = learner.sampled(step, lambda: made.sample(collect))
        taken = taken.with_columns(reward=made.reward(taken))
        learner.step(taken.with_columns(advantage=made.credit(taken)), step)
        known = learner.mover.optimiser.state[weights]
        error = known["direction"] + exact_gradient(world.mdp, known["previous"]).to(weights)
        found.append(float((error**2).sum()))
    collect.close()
    return found


def exact_gradient(mdp: MDP, weights: Tensor) -> Tensor:
    """∇J of a linear softmax policy on one-hot states: a matrix [actions, states], and an offset for each action."""
    import torch

    table, offset = weights.split([mdp.actions * mdp.states, mdp.actions])  # type: ignore[no-untyped-call]
    logits = table.view(mdp.actions, mdp.states).T + offset
    ascent = torch.from_numpy(mdp.gradient(logits.double().numpy(), GAMMA, HORIZON))
    return torch.cat([ascent.T.flatten(), ascent.sum(0)])


def less_error(seed: int) -> dict[str, float]:
    """By what factor plain momentum's late errors are larger than extrapolated ones, as a logarithm, over some MDPs.

    A single course of estimates is so noisy that its factor says little. `hessian` is HARPG's, by the same measure.
    """
    numbers = range(100 * (seed + 1), 100 * (seed + 1) + MDPS)
    plain, ahead, bent = (
        [math.log(sum(squared_errors(number, correction)[STEPS // 2 :])) for number in numbers]
        for correction in CORRECTIONS
    )
    return {"less error": (sum(plain) - sum(ahead)) / MDPS, "hessian": (sum(plain) - sum(bent)) / MDPS}


CLAIM = Ahead(
    "With as many trajectories and the same memory, the moving average of gradients taken at extrapolated weights is "
    "closer to the true gradient than that of gradients taken at the weights themselves.",
    less_error,
)


PUBLISHED: Published = {
    "arXiv 2302.01734, schedules": {
        "update.eta": "decaying",
        "update.eta.power": 0.8,
        "update.schedule": "decaying",
        "update.schedule.power": 1.0,
        "update.correction": "extrapolate",
        "harpg:update.eta.power": 1.0,
        "harpg:update.schedule.power": 0.5,
        "harpg:update.normalise": False,
        "n-harpg:update.eta.power": 1.0,
        "n-harpg:update.schedule.power": 1.0,
        "n-harpg:update.normalise": True,
    },
    "arXiv 2302.01734, experiments": {
        "update.lr": 0.1,
        "credit.gamma": 0.99,
        "control:policy.hidden": (32, 32),
    },
}


@method("n-pg-igt@1", paper=126, base="reinforce", world="cartpole", claim=CLAIM,
        presets={"control": CONTROL, "harpg": HARPG, "n-harpg": N_HARPG}, published=PUBLISHED)  # fmt: skip
def n_pg_igt() -> OnPolicy:
    """N-PG-IGT (arXiv 2302.01734). θ̃ = θ + (1−η)/η·(θ − θ_before); d = (1−η)d + η·g(τ ~ π_θ̃); θ + γ·d/‖d‖.

    Momentum averages gradients of older weights. Here trajectories are drawn with weights extrapolated so far that the
    average is the gradient at the present ones, without importance weights and from one trajectory a step, if need be.
    The presets `harpg` and `n-harpg` correct the average instead: by a Hessian-vector product, estimated on a second
    batch that is drawn at a random point of the last step. (In the released code its score term has the other sign and
    is not a product trajectory by trajectory; it is here, and is tested against finite differences.)
    """
    return reinforce().but(
        sample=groups(prompts=32, group=1),
        credit=over_others(gamma=GAMMA, discounted=True, normalise=False),
        update=momentum(
            lr=0.1, eta=decaying(power=0.8), correction="extrapolate", schedule=decaying(power=1.0)
        ),
    )
