"""Self-Play Preference Optimization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.evidence.claims import Learns
from panoply.evidence.races import SIX_PROMPTS
from panoply.experience import Experience
from panoply.methods.base.grpo import grpo
from panoply.parts import Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.sample.groups import groups
from panoply.slots.schedule.schedules import linear
from panoply.slots.select.pairs import best_worst
from panoply.slots.update.optimisers import rmsprop


def _signal(held: Any) -> frozenset[str]:
    return frozenset({"world:verify", f"signal:{held.name}"})


@part(
    "reward",
    equation="P̂ = mean_k σ({sharpness}·({name} − {name}_k)) over the group",
    needs=_signal,
    bounds={"sharpness": "at least 0"},
)
def win_rate(experience: Experience, *, name: str = "true", sharpness: float = 12.0) -> Tensor:
    """How often an answer would be preferred to the group's answers, itself included (½), on its last decision."""
    episodes = experience.by("episode")
    score, group = episodes.sum(experience[f"signal:{name}"]), episodes.first(experience["group"])
    wins = torch.sigmoid(sharpness * (score[:, None] - score[None, :]))
    peers = (group[:, None] == group[None, :]).to(wins.dtype)
    return episodes.rows((wins * peers).sum(1) / peers.sum(1)) * episodes.is_last()


@part(
    "surrogate",
    equation="−(log π/π_t − {eta}·(P̂ − ½))²",
    unit="episode",
    needs={"logp@old"},
    scores="policy",
    bounds={"eta": "above 0", "weight": "above 0"},
)
def win_rate_regression(batch: Batch, *, eta: float = 1000.0, weight: float | Part = 1.0) -> Values:
    """Regress an answer's log-ratio to the policy that wrote it on η times its win rate less ½.

    ½, not the group's mean, is subtracted: it is the win rate of the policy against itself. The log-ratio is a sum
    over tokens, so with η = 1000 the target is a direction and not a value to reach.
    """
    ratio = batch.episode_log_ratio("old")
    target = eta * (batch.by("episode").sum(batch["reward"]) - 0.5)
    stats = {
        "chosen_logratio": ratio.detach()[target > 0],
        "rejected_logratio": ratio.detach()[target < 0],
        "target": target.abs(),
    }
    return -((ratio - target) ** 2), stats


TINY = {
    "sample.prompts": 64,
    "sample.temperature": 1.0,
    "surrogate.eta": 5.0,
    "update": "adam",
    "update.lr": 1e-4,
    "update.beta2": 0.95,
    "update.minibatches": 8,
    "update.schedule": "constant",
    "run.steps": 40,
}


ITERATIVE_DPO = (
    "iterative dpo=online-dpo:reward.name=true,surrogate.loss.to=old,"
    "sample.prompts=64,sample.group=5,update.minibatches=8"
)
"""A round a step, like SPPO's: pairs of the policy's own answers, and the policy at the round's start as reference."""
CLAIM = Learns(
    "In rounds against itself, regressing what wins on how often it wins learns more from as many answers than "
    "iterative DPO, which only moves winners and losers apart.",
    over=ITERATIVE_DPO,
    world="strings",
    budget="episodes=2560",
    also=("success", "true", "mean:chosen_logratio", "mean:rejected_logratio"),
    waives={"problems": SIX_PROMPTS},
    reworded="it failed by how much likelier winners become, which saturates once both sides answer well.",
)


PUBLISHED: Published = {
    "arXiv 2405.00675, §5": {
        "sample.group": 5,
        "sample.temperature": 0.7,
        "sample.top_p": 1.0,
        "surrogate.eta": 1000.0,
    },
    "uclaml/SPPO, scripts/pipeline.sh": {"update": "rmsprop", "update.lr": 5e-7},
    "uclaml/SPPO, recipes/uclaml-sppo/config_full.yaml": {
        "update.schedule": "linear",
        "update.schedule.warmup": 0.1,
        "update.minibatches": 4,
    },
    "torch.optim.RMSprop and transformers, as that code calls them": {
        "update.decay": 0.99,
        "update.epsilon": 1e-8,
        "update.clip": 1.0,
    },
}
"""Batches of 64 pairs: 256 prompts in four. The released code samples with top_p 0.9. Its win rates are of a model
whose scores have another scale."""


@method(
    "sppo@1",
    paper=120,
    base="grpo",
    world="strings",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
    tags=("data=prefs", "feedback=annotators", "reward=pairwise", "optimisation=direct"),
)
def sppo() -> OnPolicy:
    """Self-Play Preference Optimization (arXiv 2405.00675). (log π/π_t − η·(P̂(y ≻ π_t) − ½))².

    Each step is a round against the policy as it was at its beginning, an approximate multiplicative-weights update:
    what wins goes up and what loses goes down in absolute terms, where DPO only moves them apart. Of a group the best
    and the worst answer learn. In a game without a best move only the average of the rounds' policies comes to
    rest; the last one cycles.
    """
    return grpo().but(
        sample=groups(prompts=256, group=5, temperature=0.7),
        reward=win_rate(),
        select=(best_worst(),),
        surrogate=win_rate_regression(eta=1000.0),
        regularise=(),
        update=rmsprop(lr=5e-7, epsilon=1e-8, clip=1.0, minibatches=4, schedule=linear(warmup=0.1)),
    )
