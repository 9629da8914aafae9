"""ReCOIL, of Dual RL: imitation from demonstrations and any other data, without a discriminator."""

from __future__ import annotations

from typing import Any

import torch

from panoply.batch import Values
from panoply.evidence.claims import Learns
from panoply.methods.base.iql import iql
from panoply.parts import Finding, Part, part
from panoply.regimes import Offline
from panoply.registry import Published, method
from panoply.slots.loss.bellman import expectile_v
from panoply.slots.replay.uniform import uniform
from panoply.transitions import ActorCritic, Transitions


def _impossible(held: Any, method: Any) -> list[Finding]:
    if method.replay.settings().get("n_step", 1) > 1:
        return [("cost", "it is paid a step, so replay.n_step is 1")]
    own = "own experience has no demonstrations, so sample is to be left out"
    return [("bound", own)] if "sample" in method.slots() else []


@part(
    "loss",
    equation="½·Σ_i [1(expert)·(Q_i(s,a) − {bound})² + (Q_i(s,a) − (γ·V(s′) − {cost}))²]",
    unit="transition",
    learns=("q",),
    needs={"network:q", "network:v", "world:demonstrations"},
    impossible=_impossible,
    bounds={"bound": "above 0", "cost": "at least 0"},
)
def recoil_q(
    learned: ActorCritic,
    rows: Transitions,
    *,
    bound: float = 200.0,
    cost: float = 2.0,
    update: Part | None = None,
) -> Values:
    """Up where the expert was, down everywhere else, and consistent in time: no reward is looked at.

    bound   what an expert's steps are worth at most, and after an end minus that: cost/(1 − γ)
    """
    with torch.no_grad():
        after = rows.discount * learned.after(rows) - cost
        target = torch.where(rows.discount > 0, after, -bound)
    shown = rows["expert"].to(target.dtype)
    values = learned.networks["q"](rows.observation, learned.taken(rows))
    errors = [shown * (value - bound).square() + (value - target).square() for value in values]
    stats = {"q": values[0].detach(), "target": target, "shown": shown}
    return 0.5 * torch.stack(errors).sum(0), stats


CLAIM = Learns(
    "From one episode of an expert's among random ones, where cloning all of the data is no better than chance, "
    "matching the mixture with ReCOIL is better than that.",
    method="recoil=recoil:replay.batch=64,replay.gamma=0.95,targets.tau=0.05,losses.recoil_q.bound=20,losses.recoil_q.cost=1",
    over="bc=bc:update.minibatches=500",
    world="logged:pendulum-demonstrated",
    budget="steps=16",
    metric="success",
    best=-150.0,
    settings={"policy.hidden": (64, 64), "run.held_out": 100},
    tune={"update.lr": (3e-4, 1e-3, 3e-3)},
    waives={"room": "that its baseline is at the floor is what the claim says"},
    reworded="it did not say that its baseline is no better than chance, and neither side was tuned.",
)


PUBLISHED: Published = {
    "released code, critic loss": {
        "losses.recoil_q.bound": 200.0,
        "losses.recoil_q.cost": 2.0,
    },
    "arXiv 2302.08560, appendix": {
        "update.lr": 0.0003,
        "replay.gamma": 0.99,
        "targets.tau": 0.005,
        "losses.advantage_weighted.most": 100.0,
        "replay.experts": 0.5,
        "control:policy.hidden": (256, 256),
    },
}


@method(
    "recoil@1",
    paper=198,
    base="iql",
    world="logged:pendulum-demonstrated",
    claim=CLAIM,
    published=PUBLISHED,
    tags=("data=demos", "feedback=teacher", "reward=none"),
)
def recoil() -> Offline:
    """ReCOIL of Dual RL (arXiv 2302.08560): imitate an expert with the help of data that is not the expert's.

    Visits of policy and data together are matched with those of expert and data together. In the χ² form that is used
    in practice, Q is pulled up on the expert's steps and down elsewhere, and follows Bellman's equation without reward;
    V and the policy are IQL's. Half of a batch is the expert's.
    """
    _, policy, _ = iql().losses
    return iql().but(
        replay=uniform(batch=256, gamma=0.99, updates=500, experts=0.5),
        losses=(expectile_v(expectile=0.7), policy, recoil_q()),
    )
