"""Rewarding the unlikely: of the right answers, rare ones earn more."""

from __future__ import annotations

import torch
from torch import Tensor

from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import grpo
from panoply.parts import Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import token_mean
from panoply.slots.regularise.terms import kl
from panoply.slots.reward.signals import signal
from panoply.slots.sample.dynamic import dynamic
from panoply.slots.select.filters import varied_groups
from panoply.slots.update.optimisers import adam

_SIGNAL = signal()
DIGITS = 5
"""Of a mean log-probability. Equal answers differ by rounding errors alone, and are to be equally likely."""


def ranks(likely: Tensor, groups: Segments) -> Tensor:
    """For each episode how many of its group are less likely, from 0 to G − 1; equals share the mean of their ranks."""
    order = likely.argsort(stable=True)
    order = order[groups.index[order].argsort(stable=True)]
    of, sorted_likely = groups.index[order], likely[order]
    place = torch.arange(len(order), device=order.device) - (groups.count.cumsum(0) - groups.count)[of]
    steps = (of[1:] != of[:-1]) | (sorted_likely[1:] != sorted_likely[:-1])
    equals = Segments(torch.cat([steps.new_zeros(1), steps]).cumsum(0))
    found = torch.empty(len(order), dtype=likely.dtype, device=likely.device)
    found[order] = equals.rows(equals.mean(place.to(likely.dtype)))
    return found


@part(
    "reward",
    equation=lambda held: f"({held.reward.equation()})·(1 − {held.beta:g}·rank/G), rank 0 = the least likely",
    bounds={"beta": "from 0 up to 1"},
)
def unlikely(experience: Experience, *, reward: Part = _SIGNAL, beta: float = 0.25) -> Tensor:
    """A reward, the less of it the likelier an episode is among its group (arXiv 2506.02355).

    Likely is the mean log-probability of its decisions under the policy that took them, not the one that learns. All of
    the group are ranked, wrong ones too; what earned nothing stays at 0, and with beta < 1 right stays above wrong.
    Made for rewards of at least 0: a penalty would shrink for likely episodes.
    """
    episodes = experience.by("episode")
    likely = torch.round(episodes.mean(experience["logp"].double()), decimals=DIGITS)
    groups = Segments(episodes.first(experience["group"]))
    factor = 1 - beta * ranks(likely, groups) / groups.rows(groups.count)
    earned: Tensor = reward(experience)
    return earned * episodes.rows(factor).to(earned.dtype)


TINY = {
    "sample.prompts": 16,
    "sample.group": 8,
    "sample.rounds": 4,
    "surrogate.high": 0.28,
    "regularise.kl": "none",
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "update.weight_decay": 0.0,
    "run.steps": 150,
}


CLAIM = Learns(
    "Where many answers are right and some are rare, paying the rare ones more keeps more different right answers than "
    "GRPO at as many passes over as many answers, and loses at most five points of success.",
    method="unlikeliness=unlikeliness:update.epochs=1",
    race="coverage",
    reworded="asked after 6,400 episodes before, when GRPO had lost none of the answers it began with",
    metric="distinct@32",
    keeps={"success": 0.05},
    also=("pass@32", "entropy", "total_decisions"),
    shows=(Shows("success", least=0.3),),
    waives={"problems": "what differs are the 32 answers to each of the numbers held out"},
)


PUBLISHED: Published = {
    "AndreHe02/rewarding-unlikely-release, examples/lean/grpo.sh": {
        "reward.beta": 0.25,
        "sample.group": 32,
        "sample.prompts": 8,
        "regularise.kl.weight": 0.1,
        "update.lr": 1e-6,
        "update.epochs": 2,
        "update.weight_decay": 0.01,
        "update.skip": 20.0,
    },
    "AndreHe02/rewarding-unlikely-release, verl/trainer/config/lean_trainer.yaml": {
        "regularise.kl.estimator": "k3",
        "reduce": "token_mean",
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "update.clip": 1.0,
    },
    "AndreHe02/rewarding-unlikely-release, verl/trainer/ppo/ray_lean_trainer.py": {
        "credit.baseline": "mean",
        "credit.scale": "std",
        "credit.epsilon": 1e-6,
    },
}
"""A batch of 256 answers is 8 groups of 32. The release asks 16 problems at a time until that many
have come together, and learns from all of them; here 8 are asked at a time, and those beyond 8 are dropped."""


@method("unlikeliness@1", paper=165, base="grpo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def unlikeliness() -> OnPolicy:
    """Unlikeliness reward (arXiv 2506.02355). R' = R·(1 − β·rank/G), two passes over each batch.

    GRPO raises what is likely already: with one update on sampled answers a rare right answer hardly moves, and the
    likely ones take its probability away. Here a right answer earns up to a quarter less, the likelier it is in its
    group, so that rare ones get the larger advantage. A second pass over the batch helps as well: the first lifts the
    likely ones to the bound of the ratio, and the next lifts the rest.

    What is surprising: groups that are all right would now learn to shift among right answers, and the deviation would
    blow up what is only a difference of ranks. They are dropped, as the release does, by the rewards as they were:
    `sample.name` and `select.varied_groups.name` are the signal. A step along a gradient longer than 20 is not
    taken; along one that is no number the release takes none either, while here the run stops. How often an answer of
    each rank is lifted, the paper's diagnostic, is not logged.
    """
    return grpo().but(
        sample=dynamic(prompts=8, group=32),
        reward=unlikely(beta=0.25),
        select=(varied_groups(name="success"),),
        credit=group(baseline="mean", scale="std", epsilon=1e-6),
        regularise=(kl(weight=0.1, estimator="k3"),),
        reduce=token_mean(),
        update=adam(lr=1e-6, weight_decay=0.01, skip=20.0, epochs=2),
    )
