"""Leave-One-Out PPO."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.batch import LOG_RATIO_LIMIT, Batch, Values
from panoply.evidence.claims import Ranks, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.rloo import TINY as RLOO_TINY
from panoply.methods.base.rloo import rloo
from panoply.parts import Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import sequence_mean
from panoply.slots.reward.signals import signal
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.ratios import STAYS, needs_against, ratio_stats, stays_at_one
from panoply.slots.update.near import adam_near

_LEFT_OUT = group(baseline="leave_one_out", scale="none")


@part(
    "credit",
    equation="{credit}, 0 where |A| < {least}",
    impossible=lambda held, method: (
        [] if held.credit.info.slot == "credit" else [("credit", "it gives no advantages")]
    ),
    bounds={"least": "at least 0"},
)
def telling(experience: Experience, *, credit: Part = _LEFT_OUT, least: float = 0.01) -> Tensor:
    """Another credit's advantages where they say something, and 0 elsewhere.

    What is 0 costs no forward pass and still counts in what sums are divided by. Were it left out, the fewer episodes
    say something, the larger a step would be.
    """
    advantage: Tensor = credit(experience)
    return advantage * (advantage.abs() >= least)


def _equation(held: Any) -> str:
    ratio = {
        "token": "ρ of a token",
        "turn": "ρ the product over a turn",
        "episode": "ρ the product over an episode",
    }
    return f"min(ρA, clip(ρ, 1/{1 + held.epsilon:g}, {1 + held.epsilon:g})·A),  {ratio[held.level]}"


@part(
    "surrogate",
    equation=_equation,
    unit="episode",
    idle="advantage",
    needs=needs_against,
    inert=lambda held, method: [("epsilon", STAYS)] if stays_at_one(held.against, method) else [],
    bounds={"epsilon": "above 0", "weight": "above 0"},
)
def product_clip(
    batch: Batch,
    *,
    level: Literal["token", "turn", "episode"] = "token",
    epsilon: float = 0.1,
    against: str = "old",
    weight: float | Part = 1.0,
) -> Values:
    """PPO's bounded ratio of tokens, of turns or of whole episodes; an episode's value is the mean over its ratios.

    A turn's ratio, or an episode's, is the product of its tokens'. The bounds are symmetric in log ρ, so that
    ε may be above 1.
    """
    episodes, advantage = batch.by("episode"), batch["advantage"]
    log_ratio = batch.log_ratio(against)
    owner = episodes.index
    if level != "token":
        units = batch.by(level)
        log_ratio = units.sum(log_ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        advantage, owner = units.mean(advantage), units.first(owner)
    ratio = log_ratio.exp()
    free, bounded = ratio * advantage, ratio.clamp(1 / (1 + epsilon), 1 + epsilon) * advantage
    acted = (free > bounded).detach()
    stats = {
        "clip_share": acted.float(),
        "unit_ratio_max/max": ratio.detach(),
        "episode_kl": -batch.episode_log_ratio(against).detach(),
    }
    value = Segments(owner).mean(torch.minimum(free, bounded))
    return value, {**ratio_stats(batch, against), **stats}


CLAIM = Ranks(
    "On episodes of several turns, learned from twice in mini-batches, ratios of single tokens learn more from as many "
    "episodes than ratios of whole episodes, and more than RLOO, which learns from each episode once.",
    ("", "loop:surrogate.level=episode", "rloo"),
    world="tools:dawdle",
    budget="episodes=3840",
    leads=True,
    also=("success", "entropy"),
    shows=(Shows("mean:clip_share", least=0.02),),
)

PUBLISHED: Published = {
    "apple/ml-loop, phi_agents/rl/conf/rl/params/default.yaml": {
        "sample.prompts": 40,
        "sample.group": 6,
        "credit.credit.baseline": "leave_one_out",
        "credit.credit.scale": "none",
        "credit.least": 0.01,
        "surrogate.level": "token",
        "surrogate.epsilon": 0.1,
        "update.epochs": 2,
        "update.clip": 0.1,
        "update.stop_kl": 20.0,
    },
    "apple/ml-loop, phi_agents/rl/conf/rl/optimization/adamw_const_lr.yaml": {
        "update.lr": 5e-5,
        "update.weight_decay": 0.01,
    },
    "apple/ml-loop, phi_agents/rl/train.py (_ppo_loss, _loss)": {"reduce": "sequence_mean"},
}

TINY = {
    **{k: v for k, v in RLOO_TINY.items() if k != "reward.beta"},
    "update.weight_decay": 0.0,
    "update.minibatches": 4,
}


@method(
    "loop@1",
    paper=47,
    base="rloo",
    world="tools",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
)
def loop() -> OnPolicy:
    """LOOP: leave-one-out PPO for interactive agents (arXiv 2502.01600).

    An episode's advantage is its return less the mean of the other episodes' of the task; there is no critic, no
    reference and no division by a deviation. Each batch is learned from twice, in shuffled mini-batches, with PPO's
    bound on the ratio of every token, 1/(1+ε) to 1+ε, where RLOO learns once and unbounded. `surrogate.level` takes
    ratios of turns or of whole episodes instead, which on long episodes are far from 1 and nearly all cut.

    Ratios are to the policy's own log-probabilities before the step, as the learner computes them, and not to what the
    sampler recorded. Episodes with |A| < 0.01 are not learned from and still counted, so that steps do not grow when
    few are left. 240 episodes in mini-batches of 32 are eight here, of 30 episodes each; the released code packs what
    its filter leaves into full ones, and so takes fewer updates. How the paper averages over the turns of an episode is
    not known; here each counts the same. What AppWorld pays, tests passed less penalties, is that world's affair: the
    reward here is the world's `success`.
    """
    return rloo().but(
        sample=groups(prompts=40, group=6),
        reward=signal(),
        credit=telling(),
        surrogate=product_clip(),
        reduce=sequence_mean(),
        update=adam_near(lr=5e-5, weight_decay=0.01, clip=0.1, stop_kl=20.0, epochs=2, minibatches=8),
    )
