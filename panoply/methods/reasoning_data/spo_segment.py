"""Segment Policy Optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens, own_episodes
from panoply.evidence.claims import Learns
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import TINY, grpo
from panoply.parts import part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.reduce.averages import token_mean
from panoply.slots.regularise.terms import kl
from panoply.slots.sample.groups import LIMITS
from panoply.slots.schedule.schedules import constant
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


def doubtful(experience: Experience, threshold: float) -> Tensor:
    """Marks the decisions that were drawn with a probability below `threshold`: the real ones."""
    return experience["logp"].exp() < threshold


def whitened(advantage: Tensor, among: Tensor) -> Tensor:
    """Less the mean and over the deviation of the marked rows; the others get 0, and so do rows that are all equal."""
    some = advantage[among]
    if len(some) < 2 or bool((some == some[0]).all()):
        return torch.zeros_like(advantage)
    return ((advantage - some.mean()) / (some.std() + 1e-8)).masked_fill(~among, 0.0)


def cut_rows(experience: Experience, threshold: float, every: int) -> Tensor:
    """Marks every `every`-th decision of an episode that was drawn with a probability below `threshold`.

    The cut is before it, so that what it leads to is its own segment's doing.
    """
    uncertain = doubtful(experience, threshold)
    count = uncertain.long().cumsum(0)
    episodes = experience.by("episode")
    before = episodes.rows(episodes.first(count - uncertain.long()))
    return uncertain & ((count - before) % every == 0)


def _cost(held: Any, of: Lengths) -> Tokens:
    """Should every decision be a doubt: continuations from each cut to the end."""
    sampled, trained = own_episodes(held, of)
    return sampled * (1 + held.samples * (of.answer // held.every)), trained


@part(
    "sample",
    equation="{prompts} prompts × {group} episodes, V̂ of {samples} continuations at every {every}th doubt",
    bounds={**LIMITS, "every": "at least 1", "samples": "at least 1", "threshold": "from 0 to 1"},
    needs={"world:text", "world:one turn"},
    gives={"column:segment_start"},
    cost=_cost,
)
def cut_and_valued(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    every: int = 5,
    samples: int = 9,
    threshold: float = 0.9,
    temperature: float = 1.0,
) -> Experience:
    """Episodes, cut before doubtful decisions; each cut has the mean success of fresh continuations (`segment_value`).

    `segment_start` marks the first decision of a segment. The continuations are the policy's own and do not learn.

    every       of the doubtful decisions, so many apart are the cuts
    samples     continuations from each cut
    threshold   a decision is doubtful where its probability was below this
    """
    tasks = collect.tasks(prompts)
    experience = collect.episodes(tasks, group, temperature=temperature)
    cut = cut_rows(experience, threshold, every)
    rows = cut.nonzero().flatten()
    known = {task.id: task for task in tasks}
    tokens = experience.context.ragged("tokens")
    asked = [known[t] for t in experience["task"][rows].tolist()]
    places = zip(
        asked, experience["context"][rows].tolist(), experience["position"][rows].tolist(), strict=True
    )
    prefixes = [tokens[row][len(task.prompt) : position].tolist() for task, row, position in places]
    value = torch.zeros(len(experience))
    if prefixes:
        value[rows] = collect.prefix_values(asked, prefixes, samples, temperature)
    return experience.with_columns(segment_start=cut, segment_value=value)


@part(
    "credit",
    equation=lambda held: (
        f"A_k = V̂(end of segment k) − V̂(its start){', whitened' if held.whiten else ''}, "
        f"where the probability is below {held.threshold:g}"
    ),
    needs={"column:segment_start"},
    bounds={"threshold": "from 0 to 1"},
)
def segment_gain(experience: Experience, *, threshold: float = 0.9, whiten: bool = True) -> dict[str, Tensor]:
    """What a segment changed in the expected success; the last one ends in the true return.

    Decisions before an episode's first cut get nothing, and those that were hardly decisions (a probability of
    `threshold` or more) do not learn and are not counted.

    threshold   the probability from which on a decision does not learn
    whiten      subtract the mean of what learns in the step, and divide by its deviation
    """
    cut, episodes = experience["segment_start"].bool(), experience.by("episode")
    number = cut.long().cumsum(0)
    number = number - episodes.rows(episodes.first(number - cut.long()))
    width = int(number.max()) + 2
    segments = Segments(episodes.index * width + number)
    starts = segments.first(experience["segment_value"])
    returns = episodes.sum(experience["reward"].float())
    owner, place = segments.keys // width, segments.keys % width
    ends = returns[owner].clone()
    follows = owner[1:] == owner[:-1]
    ends[:-1] = torch.where(follows, starts[1:], ends[:-1])
    gain = (ends - starts).masked_fill(place == 0, 0.0)
    advantage, train = segments.rows(gain), doubtful(experience, threshold)
    return {"advantage": whitened(advantage, train) if whiten else advantage, "train": train}


CLAIM = Learns(
    "Where one early mistake ruins an answer, credit for segments by fresh continuations learns more than credit for "
    "whole answers from as many answers, those that only value segments not counted.",
    method="spo-segment=spo-segment:sample.group=8,sample.every=1",
    race="chain-answers",
    also=("total_decisions",),
    reworded="it failed at as many sampled tokens, with a cut at every second doubt: the first doubt of an answer then "
    "has no credit, and answers of nineteen tokens are too short for continuations to cost less than answers.",
)


SEGMENT_TINY = {
    **TINY,
    "sample.prompts": 16,
    "sample.group": 4,
    "sample.every": 2,
    "sample.samples": 4,
    "sample.temperature": 1.0,
    "update.epochs": 1,
    "update.minibatches": 1,
}
PPO = "AIFrameResearch/SPO, configs/polIter_rho1bSft2_ppo_MATH.jsonnet and configs/trainers/ppo_MATH.jsonnet"
CHAIN = "AIFrameResearch/SPO, configs/polIter_rho1bSft2_spo_chain_MATH.jsonnet"
KL = "AIFrameResearch/SPO, configs/trainers/refKl0.0001.jsonnet and klLoss.jsonnet"
PUBLISHED: Published = {
    PPO: {
        "sample.prompts": 64,
        "sample.group": 8,
        "sample.temperature": 0.6,
        "credit.whiten": True,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "update.lr": 1e-6,
        "update.weight_decay": 0.0,
        "update.schedule.warmup": 0.03,
        "update.clip": 1.0,
        "update.epochs": 2,
        "update.minibatches": 8,
    },
    CHAIN: {"sample.samples": 9},
    "AIFrameResearch/SPO, math_episode_generator_with_mc_advantages.py": {
        "sample.every": 5,
        "sample.threshold": 0.9,
        "credit.threshold": 0.9,
    },
    KL: {"regularise.kl.weight": 1e-4, "regularise.kl.estimator": "k3"},
    "arXiv 2505.23564, eq. 6": {"reduce": "token_mean"},
}
"""512 episodes in batches of 64, twice. The code also cuts sampling to top_p 0.9, which its scores do not know of."""


@method(
    "spo-segment@1",
    paper=44,
    base="grpo",
    claim=CLAIM,
    presets={"tiny": SEGMENT_TINY},
    published=PUBLISHED,
    tags=("dynamics=known", "granularity=turn"),
)
def spo_segment() -> OnPolicy:
    """Segment Policy Optimization, SPO-chain (arXiv 2505.23564). A_k = V̂(c_{k+1}) − V̂(c_k).

    Credit between a token's and a whole answer's: cut where the policy was in doubt, ask at each cut how often it
    would succeed from there (no critic), and credit each segment with the difference. Advantages are whitened over the
    step's decisions that learn; the released code does so over each batch of a device.
    """
    return grpo().but(
        sample=cut_and_valued(prompts=64, temperature=0.6),
        credit=segment_gain(),
        regularise=(kl(weight=1e-4, estimator="k3"),),
        reduce=token_mean(),
        update=adam(lr=1e-6, epochs=2, minibatches=8, schedule=constant(warmup=0.03)),
    )
