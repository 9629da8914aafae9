"""ASearcher: long search episodes, sampled while the policy learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.evidence.claims import Identity, Learns, Shows, Speed
from panoply.experience import Column, Experience, Table
from panoply.methods.base.grpo import TINY, grpo
from panoply.methods.reasoning_data.spo_segment import whitened
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method, system
from panoply.seeds import torch_rng
from panoply.slots.credit.groups import centre, episode_returns
from panoply.slots.reduce.averages import token_mean
from panoply.slots.reward.shaping import gated
from panoply.slots.reward.signals import signal
from panoply.slots.sample.delayed import Queue, delayed, durations
from panoply.slots.select.filters import varied_groups
from panoply.slots.surrogate.ratios import STAYS, clip, ratio_stats, stays_at_one
from panoply.slots.update.optimisers import adam


def _inert(held: Any, method: Any) -> list[Finding]:
    found = [(name, STAYS) for name in ("low", "high") if stays_at_one("old", method)]
    now = method.acts_alone or method.sample.settings().get("versions") == 0
    return [
        *found,
        *([("cap", "all decisions are of the policy as the step finds it: w is 1")] if now else []),
    ]


@part(
    "surrogate",
    equation=lambda held: (
        f"1[w ≤ {held.cap:g}]·w·min(uA, clip(u, {1 - held.low:g}, {1 + held.high:g})·A),  u = π/π_old, w = π_old/μ"
    ),
    idle="advantage",
    needs={"logp@old"},
    inert=_inert,
    bounds={"low": "from 0 to 1", "high": "at least 0", "cap": "above 0", "weight": "above 0"},
)
def decoupled_clip(
    batch: Batch, *, low: float = 0.4, high: float = 0.4, cap: float = 5.0, weight: float | Part = 1.0
) -> Values:
    """PPO's bound around the policy as the step finds it, for decisions that another has taken (arXiv 2505.24298).

    u = π/π_old is bounded by 1−low and 1+high; w = π_old/μ, without a gradient, makes up for who acted. One ratio to μ
    would have the bound do both: what is old would be out of bounds before the first step. Where w is above `cap` a
    decision is left out, not cut down, and still counts in the mean.
    """
    advantage, u = batch["advantage"], batch.log_ratio("old").exp()
    w = (batch["logp@old"] - batch["logp"]).exp()
    free, bounded = u * advantage, u.detach().clamp(1 - low, 1 + high) * advantage
    acted, dropped = (free > bounded).detach(), w > cap
    value = torch.where(dropped, 0.0, w) * torch.where(acted, bounded, free)
    return value, {**ratio_stats(batch, "behaviour"), "clip_old": acted & ~dropped, "dropped": dropped}


@part("credit", equation="A = R − mean_group(R), whitened over all decisions that learn")
def centred(experience: Experience) -> Tensor:
    """An episode's return less its group's mean, then in deviations of all decisions of the batch.

    Centring comes first, so a constant in the reward cancels; whitening then gives every decision one vote.
    """
    returns, groups = episode_returns(experience)
    advantage = experience.by("episode").rows(centre(returns, groups, "mean"))
    learns = (
        experience["train"].bool() if "train" in experience else torch.ones_like(advantage, dtype=torch.bool)
    )
    return whitened(advantage, learns)


# ------------------------------------------------------------------ without a model


def gap_to_ppo(seed: int) -> Mapping[str, float]:
    """The largest difference of loss and gradient to PPO's, relative, where who acted is the policy of the step."""
    rng = torch_rng("decoupled", seed)
    old = torch.randn(256, generator=rng, dtype=torch.float64) - 2
    advantage = torch.randn(256, generator=rng, dtype=torch.float64)
    moved = 0.5 * torch.randn(256, generator=rng, dtype=torch.float64)
    rows: dict[str, Column] = {"logp": old, "logp@old": old, "advantage": advantage}
    found = []
    for surrogate in (decoupled_clip(low=0.4, high=0.4), clip(low=0.4, high=0.4)):
        now = (old + moved).requires_grad_()
        value, _ = surrogate(Batch(Experience(Table(rows), Table({})), {"logp": now}))
        found.append(torch.cat([value.detach(), torch.autograd.grad(value.sum(), now)[0]]))
    return {"largest relative difference": float((found[0] - found[1]).abs().max() / found[1].abs().max())}


@dataclass(frozen=True)
class Throughput:
    """Simulated time of as many updates, by a sampler that waits for every episode and by one that does not."""

    synchronous: float
    asynchronous: float
    staleness: float
    """Mean number of updates between the beginning of an episode and when it is learned from."""

    @property
    def speed(self) -> float:
        return self.synchronous / self.asynchronous


def _throughput(seed: int) -> Mapping[str, float]:
    found = async_rollouts(seed=seed)
    return {"times as fast": found.speed, "staleness": found.staleness}


@system(
    "async-rollouts@1",
    paper=196,
    claim=Speed(
        "Where episodes differ much in length, updates come at least twice as fast when nobody waits for the "
        "longest: in simulated time, at most four batches ahead.",
        _throughput,
        least=2.0,
    ),
)
def async_rollouts(
    batch: int = 128,
    versions: int = 4,
    tail: float = 1.0,
    slots: int | None = None,
    learning: float = 0.2,
    updates: int = 60,
    seed: int = 0,
) -> Throughput:
    """Asynchronous against synchronous sampling, in simulated time (AReaL's staleness rule, arXiv 2505.24298).

    Episodes last e^(tail·N(0, 1)), and an update takes `learning`. Who waits begins a batch after every update and
    waits for its longest episode; who does not goes on beginning episodes, in as many slots at most (none: a
    batch's), and `versions` batches ahead, and learns from what is finished.
    """
    alone = sum(max(durations([1.0] * batch, tail, seed, u * batch)) + learning for u in range(updates))
    queue, version_of, stale = Queue(), dict[int, int](), 0.0
    for update in range(updates):

        def begin(n: int, update: int = update) -> list[tuple[int, float]]:
            numbers = range(queue.begun, queue.begun + n)
            version_of.update(dict.fromkeys(numbers, update))
            return list(zip(numbers, durations([1.0] * n, tail, seed, numbers[0]), strict=True))

        taken = queue.take(batch, versions, update, slots or batch, begin)
        stale += sum(update - version_of[number] for number in taken) / batch
        queue.clock += learning
    return Throughput(alone, queue.clock, stale / updates)


# ------------------------------------------------------------------ methods

CLAIM = Learns(
    "From episodes that were begun up to eight updates ago, a bound around the policy of the step and a weight for who "
    "acted learn more than one bounded ratio to who acted.",
    over="one ratio=asearcher+surrogate=grpo:surrogate.low=0.4,surrogate.high=0.4",
    world="tools",
    budget="episodes=3840",
    settings={"sample.versions": 8, "update.minibatches": 4, "update.lr": 1e-3, "world.easy": 0.0},
    tune={},
    fixed="old episodes at a high rate are the regime: a baseline that is free to choose a small rate leaves it",
    also=("success", "clock"),
    shows=(Shows("mean:staleness", least=3.0),),
)
PUBLISHED: Published = {
    "inclusionAI/ASearcher, configs/asearcher_web.yaml": {
        "sample.group": 16,
        "sample.prompts": 128,
        "sample.temperature": 1.0,
        "sample.versions": 4,
        "surrogate.low": 0.4,
        "surrogate.high": 0.4,
        "surrogate.cap": 5.0,
        "update.lr": 5e-6,
        "update.minibatches": 1,
        "regularise.kl.weight": None,
    }
}
DONE = {"reduce", "regularise.kl", "surrogate.high"}
"""What GRPO takes over for tiny models is so here from the start, or as published."""
_TINY = {**{k: v for k, v in TINY.items() if k not in DONE}, "sample.prompts": 16}


@method(
    "asearcher@1",
    paper=196,
    base="grpo",
    world="tools",
    presets={"tiny": _TINY},
    claim=CLAIM,
    published=PUBLISHED,
)
def asearcher() -> OnPolicy:
    """ASearcher: search agents of many turns, learned asynchronously (arXiv 2508.07976).

    Episodes of up to 128 turns differ so much in length that most of a synchronous step is waiting. Here episodes go on
    while the policy learns, at most η = 4 updates ahead, and the loss is decoupled PPO's:

        L = −mean_t 1[w ≤ 5]·w·min(uA, clip(u, 0.6, 1.4)·A),   u = π/π_old,  w = π_old/μ

    with π_old the policy as the update finds it and μ whoever sampled. Without delay w is 1 and it is PPO. A success
    counts only where every turn was well formed; questions of which all episodes earned the same are left out; an
    episode's reward less its group's mean is whitened over all tokens.

    Asynchrony is simulated (`sample.delayed`), on one machine and in one process: a group's episodes are drawn when it
    begins, so versions do not change inside of an episode, as they do in the released sampler. Not built: its
    synthesis of questions (facts that are injected and blurred), and −0.5 for calling a valid question invalid, which
    no world here can be asked. The turn cap, 32 and 128 in the paper, is the world's (`world.cap`). `panoply run
    async-rollouts` simulates the gain in time.
    """
    return grpo().but(
        sample=delayed(prompts=128, group=16, versions=4),
        reward=gated(gate=signal(name="invalid", scale=-1.0), then=signal(), above=-0.5),
        select=varied_groups(),
        credit=centred(),
        surrogate=decoupled_clip(),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=5e-6),
    )


@method(
    "decoupled-ppo@1",
    paper=196,
    base="grpo",
    presets={"tiny": {k: v for k, v in TINY.items() if k not in ("surrogate.high",)}},
    claim=Identity(
        "Where who acted is the policy that the step finds, decoupled PPO has PPO's loss and gradient.",
        gap_to_ppo,
        within=1e-12,
    ),
    published={
        "inclusionAI/ASearcher, configs/asearcher_web.yaml": {"surrogate.low": 0.4, "surrogate.cap": 5.0}
    },
)
def decoupled_ppo() -> OnPolicy:
    """Decoupled PPO (arXiv 2110.00641, in AReaL's form, 2505.24298): bound and correction for who acted are two.

    GRPO with the surrogate of `asearcher`. Alone it is GRPO with a wider bound; it is for experience of earlier selves
    (`--set sample.by=past:4`), of a swarm, or of other machines.
    """
    return grpo().but(surrogate=decoupled_clip())
