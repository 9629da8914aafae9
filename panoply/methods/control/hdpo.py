"""Hindsight differentiable policy optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from panoply.batch import Batch, Values
from panoply.evidence.claims import Learns
from panoply.evidence.races import UNTRAINED_COST
from panoply.experience import Experience
from panoply.parts import part
from panoply.regimes import Dataset
from panoply.registry import Published, method
from panoply.slots.reduce.averages import token_mean
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.control import ControlCollector
    from panoply.worlds.control.inventory import Inventory

CONTROL = {
    "policy.hidden": (32, 32, 32),
    "policy.activation": "elu",
    "data.batch": 256,
    "run.steps": 400,
    "run.evaluate_every": 40,
    "run.checkpoint_every": 100,
    "run.episodes_every": 100,
    "run.held_out": 200,
}
"""The paper's network for one store; smaller batches, for a minute on two cores."""


@part(
    "data",
    equation=lambda held: (
        f"{held.batch} traces of chance" + (f", of {held.pool} in all" if held.pool else "")
    ),
    needs={"world:differentiable"},
    gives={"episodes"},
    cost=lambda held, of: (held.batch * of.answer, held.batch * of.context),
    bounds={"batch": "at least 1", "pool": "at least 1"},
)
def traces(collect: ControlCollector, *, batch: int = 8192, pool: int | None = None) -> Experience:
    """Episodes from the next starts, with the seed of each, by which all that chance does in it is known again.

    pool   how many different ones there are; none means that every one is new
    """
    first = collect.state["tasks"]
    collect.state["tasks"] += batch
    starts = collect.numbered(i % pool if pool else i for i in range(first, first + batch))
    played = collect.episodes(starts, temperature=0.0)
    of_episode = torch.tensor([start.seed for start in starts])
    return played.with_columns(reward=played["signal:reward"], trace=played.by("episode").rows(of_episode))


@part(
    "loss",
    equation="−mean_t r(s_t, π(s_t), ξ_t),  s_t+1 = f(s_t, π(s_t), ξ_t)",
    unit="episode",
    needs={"earns", "world:differentiable", "world:continuous actions", "policy:certain"},
    bounds={"ignore": "at least 0"},
)
def hindsight(batch: Batch, *, ignore: int = 0) -> Values:
    """What the policy of now would have paid a step in the same traces, differentiated through the dynamics.

    ignore   steps at an episode's beginning that do not count
    """
    counted = (batch["turn"] >= ignore).to(batch.now["earns"].dtype)
    steps = batch.by("episode").sum(counted).clamp(min=1)
    paid = -batch.by("episode").sum(batch.now["earns"] * counted) / steps
    return paid, {"cost_a_step": paid.detach()}


def best_known(world: Inventory, starts: int) -> float:
    """What the best capped base-stock rule, found on other demands, earns from held-out starts."""
    from panoply.worlds.control.yardsticks import best_rule, costs_of_rules

    level, cap = best_rule(world)
    seeds = np.array([world.task("test", i).seed for i in range(starts)])
    periods = world.horizon or 50
    cost = costs_of_rules(world, np.array([level]), np.array([cap]), world.demands(seeds, periods))
    return -periods * float(cost[0])


CLAIM = Learns(
    "One store, demand that is lost, four periods of lead: at equal simulated periods the pathwise gradient costs less "
    "than PPO with the same network, and comes within 2 % of the best capped base-stock rule.",
    method="hdpo=hdpo:data.batch=32",
    over="ppo=ppo:sample.envs=64,sample.length=50,update.epochs=4,update.minibatches=8,policy.normalise=true",
    world="inventory",
    budget="decisions=320k",
    metric="held_out_greedy",
    tuned_by="area:held_out_greedy",
    settings={
        "policy.hidden": (32, 32, 32),
        "policy.activation": "elu",
        "run.held_out": 200,
        "run.episodes_every": 0,
    },
    tune={"update.lr": (1e-3, 3e-3, 1e-2)},
    waives={"room": UNTRAINED_COST},
    reaches=lambda world, starts: 1.02 * best_known(world, starts),
)


PUBLISHED: Published = {
    "released code, config_files": {
        "data.batch": 8192,
        "data.pool": 32768,
        "update.lr": 0.003,
        "update.clip": 1.0,
        "control:policy.hidden": (32, 32, 32),
        "control:policy.activation": "elu",
    },
}


@method(
    "hdpo@1",
    paper=60,
    presets={"control": CONTROL},
    world="inventory",
    claim=CLAIM,
    published=PUBLISHED,
    tags=("on_policy=yes",),
)
def hdpo() -> Dataset:
    """Hindsight differentiable policy optimization (arXiv 2306.11246): replay what chance did, and backpropagate.

    Demand does not depend on what is ordered, so a trace of it can be run again under any policy: the known dynamics
    are unrolled in torch and the total cost is differentiated through all periods. No log-probability, no baseline, no
    exploration; the gradient has the variance of the traces alone. Several epochs on the same traces are exact too.
    """
    return Dataset(
        data=traces(batch=8192, pool=32768),
        losses=(hindsight(),),
        reduce=token_mean(),
        update=adam(lr=3e-3, clip=1.0),
    )
