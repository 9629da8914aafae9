"""ShIOEnv: shell commands are built production by production, and paid for the arguments that matter."""

from __future__ import annotations

from panoply.evidence.claims import Ranks, Shows
from panoply.methods.base.ppo import ppo
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.gae import gae
from panoply.slots.loss.values import squared_value
from panoply.slots.model.values import critic
from panoply.slots.regularise.terms import entropy
from panoply.slots.reward.signals import signal
from panoply.slots.sample.groups import groups
from panoply.slots.schedule.schedules import linear
from panoply.slots.update.optimisers import adam

CLAIM = Ranks(
    "From new weights, PPO whose draws are masked by a grammar comes to commands with more arguments that matter, m·S, "
    "than PPO that may draw any production, in as many commands.",
    order=("", "without a grammar=shioenv:world.masked=false"),
    world="program:shell",
    budget="episodes=2048",
    metric="worth",
    settings={"run.model": "fresh"},
    best=8.0,
    tuned_by="worth",
    shows=(Shows("valid", most=0.9),),
    also=("success", "minimal", "arguments", "valid", "mean:worth"),
    waives={
        "room": "m·S is no success, and without a grammar hardly any command of new weights runs: see `valid`"
    },
)

TINY = {
    "sample.prompts": 128,
    "update.lr": 1e-3,
    "update.beta2": 0.95,
    "update.minibatches": 4,
    "update.epochs": 2,
    "run.steps": 24,
}
PUBLISHED: Published = {
    "synlab-jragsdale/ShIOEnv, ShIOEnv/policy_config.json": {
        "credit.gamma": 1.0,
        "credit.lam": 0.95,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "regularise.entropy.weight": 0.01,
        "models.critic.loss.weight": 1.0,
        "update.lr": 5e-5,
        "update.epochs": 4,
        "update.minibatches": 8,
    },
    "synlab-jragsdale/ShIOEnv, ShIOEnv/agent.py": {"update.clip": 0.5, "update.schedule": "linear"},
}
"""½·error² with weight 1 is its 0.5·error². A buffer has 1024 decisions and a mini-batch 128; here it has as many
commands as make about 1024."""


@method(
    "shioenv@1",
    paper=71,
    base="ppo",
    world="program:shell",
    claim=CLAIM,
    presets={"tiny": TINY},
    published=PUBLISHED,
    tags=("data=rules", "feedback=program"),
)
def shioenv() -> OnPolicy:
    """ShIOEnv (arXiv 2505.18374): a world of shell commands, and PPO that builds them within a grammar.

    The work is the world, `program:shell`: after every argument a command is run, and again without each of its
    arguments, and S is the share that mattered. An argument earns ΔS/L at once (and 1/L where a perfect command stays
    so), the end (m/L)·(S − margin), less 1 for a command that fails (`score`). Which utility it is, and what stands for
    its files, patterns and numbers, chance says beforehand, so that easy utilities cannot be favoured. The policy is
    PPO with γ = 1, and what could be drawn is recorded with every decision: ratios are of the masked distribution.

    `world.masked=false` lets any production follow any other. A policy that knows nothing, masked or not, is `--model
    fresh` before its first step. A margin of 0 pays for length even where half of the arguments do nothing.

    The paper has forty utilities of Ubuntu in containers, where outputs vary from run to run, and a threshold for that
    of which 0.95 is left here, where they do not; L is 14 in the code and 13 in the paper, and 8 here. The critic here
    has weights of its own, learns in the same update, and regresses on A + V; in the code it is a second head, and
    regresses on what was earned in the end. Data sets for a model that predicts outputs are not made.
    """
    return ppo().but(
        sample=groups(prompts=192, group=1),
        reward=signal(name="score"),
        credit=gae(gamma=1.0, lam=0.95),
        regularise=(entropy(weight=0.01),),
        update=adam(lr=5e-5, clip=0.5, schedule=linear(), epochs=4, minibatches=8),
        models=(critic(loss=squared_value(weight=1.0), update=None),),
    )
