"""FamO2O: a family of policies, and in every state the member that suits it."""

from __future__ import annotations

import torch

from panoply.batch import Values
from panoply.evidence.claims import Ranks
from panoply.methods.base.iql import CONTROL, iql
from panoply.parts import Part, part
from panoply.policies.balance import Balance
from panoply.regimes import Offline
from panoply.registry import method
from panoply.slots.data.logged import logged
from panoply.slots.loss.bellman import expectile_v, q_of_v, wanted
from panoply.slots.network.critics import q, temperature, v
from panoply.slots.sample.explore import explore
from panoply.transitions import Agent, Transitions


def _balance(agent: Agent) -> Balance:
    found = agent.policy.model.balance
    assert found is not None
    return found


@part(
    "loss",
    equation="−min(exp(β·(min_j Q′_j(s,a) − V(s))), {most})·log π(a|s,β), β ~ any, later ~ π_b(β|s)",
    unit="transition",
    learns=("policy.layers", "policy.head"),
    needs={"target:q", "network:q", "network:v", "policy:balanced"},
    bounds={"most": "above 0"},
)
def family_weighted(
    agent: Agent, rows: Transitions, *, most: float = 100.0, update: Part | None = None
) -> Values:
    """IQL's weighted imitation for every β of the range at once, and, once the policy acts, for the β it acts by."""
    with torch.no_grad():
        balance = _balance(agent)
        if agent.acting:
            beta, _ = balance.draw(agent.policy.model.features(rows.observation), agent.noise(len(rows), 1))
        else:
            share = 2 * torch.rand(len(rows), generator=agent.generator).to(agent.policy.device) - 1
            beta = balance.scaled(share)
        gain = wanted(agent, rows) - agent.baseline(rows)
        weight = (beta * gain).exp().clamp(max=most)
    return -weight * agent.logp(rows, beta), {"advantage": gain, "weight": weight}


@part(
    "loss",
    equation="α·log π_b(β|s) − min_j Q′_j(s,a) − log α·(log π_b(β|s) + {entropy}), a ~ π(a|s,β), β ~ π_b",
    unit="transition",
    learns=("policy.balance", "temperature"),
    needs={"target:q", "network:q", "network:temperature", "policy:balanced", "world:continuous actions"},
    bounds={"entropy": "any number"},
)
def balanced(agent: Agent, rows: Transitions, *, entropy: float = -0.5, update: Part | None = None) -> Values:
    """The balance policy climbs the critics through the family, which is held fixed: gradients reach β alone.

    entropy: of β in units of half its range; its weight α is tuned to hold it there
    """
    balance, alpha = _balance(agent), agent.networks["temperature"]
    features = agent.policy.model.features(rows.observation)
    beta, logp = balance.draw(features, agent.noise(len(rows), 1))
    action, _ = agent.draw(rows.observation, beta)
    value = alpha() * logp - agent.targets["q"].least(rows.observation, action)
    if alpha.learned:
        value = value - alpha.log * (logp.detach() + entropy)
    chosen = balance(features).detach()
    stats = {"beta": chosen, "beta_spread": chosen.std()[None], "balance_entropy": -logp.detach()}
    return value, stats


SETTINGS = {**CONTROL, "policy.betas": (1.0, 5.0)}
ONLINE = "+sample=explore:sample.random=0,losses.advantage_weighted.beta="
CLAIM = Ranks(
    "In a maze whose data is good in one half and random in the other, choosing β in every state earns no less after "
    "offline and online learning than IQL with any one β.",
    order=("famo2o=famo2o:policy.betas=1,10", *(f"beta {beta}=iql{ONLINE}{beta}" for beta in (1, 3, 10))),
    leads=True,
    margins=(1.0, 1.0, 1.0),
    world="logged:pointmass-halves",
    budget="steps=6",
    metric="success",
    settings={
        "world.options": "{variant: rooms}",
        "policy.hidden": (64, 64),
        "replay.batch": 64,
        "replay.gamma": 0.95,
        "targets.tau": 0.05,
        "data.alone": 4,
        "replay.updates": 250,
        "sample.length": 250,
        "run.evaluate_every": 3,
        "run.held_out": 40,
    },
    tune={"update.lr": (1e-3,)},
)


@method(
    "famo2o@1",
    paper=142,
    base="iql",
    presets={"control": SETTINGS},
    world="logged:pointmass-halves",
    claim=CLAIM,
)
def famo2o() -> Offline:
    """FamO2O (arXiv 2310.17966): IQL for a whole range of β, and a second policy that picks β in every state.

    Trained on logged data for random β, the policy then acts with the β that a balance policy finds best by the
    critics, and goes on learning with that one: careful where the data is good, bold where it is not.
    """
    return iql().but(
        data=logged(),
        sample=explore(length=500, random=0),
        networks=(q(count=2), v(), temperature(start=1.0)),
        losses=(expectile_v(expectile=0.7), balanced(), family_weighted(), q_of_v()),
    )
