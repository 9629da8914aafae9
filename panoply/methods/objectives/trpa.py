"""TRPA: rules order answers by level, every pair across levels is a preference, and a KL term holds each step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.evidence import races
from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience, Segments, Table
from panoply.methods.base.online_dpo import online_dpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import episode_returns
from panoply.slots.loss.pairs import episode_scores, pair_stats, snapshot_needs
from panoply.slots.reduce.averages import token_mean
from panoply.slots.regularise.terms import estimate, kl, needs_to, one_update
from panoply.slots.sample.groups import groups
from panoply.slots.surrogate.preferences import preference
from panoply.slots.update.optimisers import adam

# ------------------------------------------------------------------ levels and pairs


def levels(experience: Experience, rules: tuple[str, ...], least: float) -> tuple[Tensor, Tensor]:
    """The level of each episode, 1 the best, and whether it is the best; without rules, minus what it earned.

    A rule counts only where all before it are met: a right answer in a wrong format is a wrong format.
    """
    returns, peers = episode_returns(experience)
    if not rules:
        return -returns, returns == peers.rows(peers.max(returns))
    episodes = experience.by("episode")
    met = [episodes.sum(experience[f"signal:{rule}"].float()) >= least - 1e-6 for rule in rules]
    level = 1 + len(rules) - torch.stack(met).long().cumprod(0).sum(0)
    return level, level == 1


def across(level: Tensor, peers: Segments) -> tuple[Tensor, Tensor]:
    """All pairs of a group's members of which the first has the smaller level, as two columns of their places."""
    grid = peers.grid()
    there, held = grid >= 0, level[grid.clamp(min=0)]
    better = (held[:, :, None] < held[:, None]) & there[:, :, None] & there[:, None]
    row, first, second = better.nonzero(as_tuple=True)
    return grid[row, first], grid[row, second]


def _levelled_needs(held: Any) -> frozenset[str]:
    return frozenset({"world:verify", *(f"signal:{rule}" for rule in held.rules)} if held.rules else ())


def _levelled_equation(held: Any) -> str:
    by = " → ".join(held.rules) if held.rules else "what they earned"
    return f"all pairs of a group across levels, by {by}"


@part(
    "select",
    equation=_levelled_equation,
    needs=_levelled_needs,
    gives={"pairs", "column:top", "column:alone"},
    inert=lambda held, method: (
        [] if held.rules else [("least", "without rules episodes are ordered by reward")]
    ),
    bounds={"least": "any number"},
)
def levelled(
    experience: Experience, *, rules: tuple[str, ...] = ("ended", "success"), least: float = 1.0
) -> Experience:
    """Every pair of answers to one prompt that are of different levels, the better one first. No episode is dropped.

    rules   signals from the most basic to the last. An episode's level is 1 where it meets all of them, one more where
            the last is missed, …; what it misses first decides. Without rules, every return is a level of its own
    least   what a signal must come to over the episode for its rule to be met

    Three columns are added: `level`; `top`, whether the episode is of the best level (without rules, of its group);
    and `alone`, which is 0, and only where a whole batch has no pair +1 for the best level and −1 for others.
    """
    level, top = levels(experience, rules, least)
    episodes, (_, peers) = experience.by("episode"), episode_returns(experience)
    first, second = across(level, peers)
    alone = torch.zeros_like(level) if len(first) else torch.where(top, 1, -1)
    columns = {"level": level, "top": top, "alone": alone}
    pairs = {"chosen": episodes.keys[first], "rejected": episodes.keys[second]}
    return experience.with_columns(**{n: episodes.rows(c) for n, c in columns.items()}).with_pairs(
        Table(pairs)
    )


# ------------------------------------------------------------------ what is asked of them


@part(
    "loss",
    equation=lambda held: (
        f"−log σ(κ·{held.beta:g}·(ℓ_chosen − ℓ_rejected)),  ℓ = mean log π/π_{held.to},  "
        f"κ = {held.anisotropy:g} where the chosen is of the best level, else 1"
    ),
    unit="pair",
    stream="imitation",
    needs=lambda held: snapshot_needs(held) | {"column:top"},
    bounds={"weight": "above 0", "beta": "above 0", "anisotropy": "above 0"},
)
def anisotropic(
    batch: Batch,
    *,
    weight: float | Part = 1.0,
    beta: float = 0.1,
    anisotropy: float = 2.5,
    to: str | None = "reference",
) -> Values:
    """DPO's loss on mean log-ratios, steeper where the chosen side is of the best level (column `top`).

    anisotropy: how much steeper. It is inside of the sigmoid: such pairs pull harder at first and are satisfied sooner
    """
    chosen, rejected = batch.pair_rows(episode_scores(batch, to, per_token=True))
    best, _ = batch.pair_rows(batch.by("episode").first(batch["top"]))
    margin = torch.where(best, anisotropy * beta, beta) * (chosen - rejected)
    return -F.logsigmoid(margin), pair_stats(margin, chosen, rejected)


@part(
    "regularise",
    equation="−log σ(±ℓ),  ℓ = mean log π/π_{to},  + for the best level, in batches without any pair",
    unit="episode",
    needs=lambda held: snapshot_needs(held) | {"column:alone"},
    scores="policy",
    bounds={"weight": "above 0"},
)
def without_pairs(batch: Batch, *, weight: float | Part = 1.0, to: str = "reference") -> Values:
    """What is left to learn where a batch has no pair: the best level is raised, all else lowered (column `alone`)."""
    side = batch.by("episode").first(batch["alone"])
    value = -F.logsigmoid(side * episode_scores(batch, to, per_token=True))
    return torch.where(side != 0, value, 0.0), {"without_pairs": (side != 0).float()}


def _root_prepare(batch: Batch, *, weight: float | Part, shift: float, to: str) -> Tensor:
    return estimate(batch.log_ratio(to), "k3").mean()


def _root_inert(held: Any, method: Any) -> list[Finding]:
    return [(name, why) for why in one_update(held.to, method) for name in ("weight", "shift", "to")]


@part(
    "regularise",
    equation="√(KL + {shift}),  KL the mean of k3 to π_{to} over a mini-batch",
    needs=needs_to,
    prepare=_root_prepare,
    inert=_root_inert,
    bounds={"weight": "above 0", "shift": "above 0"},
)
def root_kl(batch: Batch, *, weight: float | Part = 0.001, shift: float = 0.25, to: str = "old") -> Values:
    """The root of a mini-batch's mean k3, which pulls as `kl` does near π_old and less steeply far from it.

    A root of a mean is no mean of roots: every decision is weighed by the slope of the root at the mini-batch's KL.
    """
    height = (batch.prepared["root_kl"] + shift).sqrt()
    each = estimate(batch.log_ratio(to), "k3")
    return height + (each - batch.prepared["root_kl"]) / (2 * height), {f"kl_{to}": each.detach()}


# ------------------------------------------------------------------ the method

TINY = {
    "sample.prompts": 16,
    "sample.group": 8,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "update.minibatches": 2,
    "run.steps": 150,
}
CONTROL = {
    "sample.prompts": 4,
    "sample.group": 8,
    "select.levelled.rules": (),
    "update.lr": 1e-3,
    "update.clip": 0.5,
    "update.epochs": 8,
    "update.minibatches": 4,
    "run.steps": 60,
    "run.evaluate_every": 10,
}
"""Where there are no rules to meet, episodes from one start are ordered by what they earned."""


CLAIM = Learns(
    "Where a reward also pays for something useless, a quarter for each z, GRPO is drawn to it until hardly an answer "
    "succeeds. Levels made of the same reward, which say whether it is at least 0.75 and not by how much, still "
    "succeed after as many answers and updates.",
    method="trpa=trpa:select.levelled.rules=proxy,select.levelled.least=0.75",
    over="grpo",
    world="strings:hack",
    budget="episodes=12800",
    metric="success",
    settings={"update.minibatches": 2},
    tune={},
    fixed="a reward that is hacked is the regime: a baseline free to choose a lower rate does not get as far",
    also=("area", "proxy", "true", "format", "kl_old", "total_decisions"),
    shows=(Shows("proxy", least=1.5), Shows("success", most=0.5)),
    waives={
        "problems": races.SIX_PROMPTS,
        "room": "the baseline rises to 0.9 and then falls, which is what the claim is about: see what it must show",
    },
)


PUBLISHED: Published = {
    "XueruiSu/Trust-Region-Preference-Approximation, main_TRPA.sh": {
        "sample.prompts": 4,
        "sample.group": 16,
        "sample.temperature": 1.0,
        "surrogate.loss.beta": 0.1,
        "surrogate.loss.anisotropy": 2.5,
        "regularise.kl.weight": 0.001,
        "regularise.kl.estimator": "k3",
        "update.lr": 4e-7,
        "update.epochs": 1,
    },
    "XueruiSu/Trust-Region-Preference-Approximation, verl/trainer/ppo/core_algos.py": {
        "surrogate.loss": "anisotropic",
        "surrogate.loss.to": "reference",
        "regularise.without_pairs.to": "reference",
    },
    "XueruiSu/Trust-Region-Preference-Approximation, verl/workers/actor/dp_actor.py": {
        "regularise.kl.to": "old",
        "reduce": "token_mean",
        "update.clip": 1.0,
    },
}
"""Its rules for puzzles are three: the format, a complete answer, the right one. Those here are signals that most
worlds of text have. The script's mini-batches are larger than its batches, so that it takes one update a batch."""


@method(
    "trpa@1",
    paper=158,
    base="online-dpo",
    presets={"tiny": TINY, "control": CONTROL},
    claim=CLAIM,
    published=PUBLISHED,
)
def trpa() -> OnPolicy:
    """Trust Region Preference Approximation (arXiv 2504.04524). −log σ(κβ(ℓ_w − ℓ_l)) + c·KL_k3(π, π_old).

    Rules put each answer on a level: 1 is right, 2 is wrong but in the right format, the last is not even that. Every
    pair of answers to one prompt from two levels is a preference, and is learned by DPO with mean instead of summed
    log-ratios; where the better one is right, 2.5 times as steeply. Levels only say what is better and not by how much,
    so that no weight between format and success can be set wrongly.

    Two policies are compared with, which are not the same: ℓ is against the fixed start, the KL term against π_old, the
    policy that the batch was sampled from. With one update a batch, as the authors' script has it, π is π_old when the
    gradient is taken, and the KL term is 0 with a gradient of 0: here a batch is divided into as many mini-batches as
    it has prompts, and `update.minibatches=1` is the script's way. Since answers are drawn from π_old and not from π,
    what k3 follows is χ²(π_old‖π) − KL(π_old‖π), near π_old a KL. `regularise.root_kl` is the variant c·√(KL + ¼).

    A group of one level makes no pair. Where a whole batch has none, its answers are learned from one by one
    (`without_pairs`), without β; the authors do so in every micro-batch, whose size then changes what is learned.
    Credit is not used. Their option of an entropy bonus is `regularise=entropy`.
    """
    return online_dpo().but(
        sample=groups(prompts=4, group=16),
        select=(levelled(),),
        surrogate=preference(loss=anisotropic()),
        regularise=(kl(weight=0.001, estimator="k3", to="old"), without_pairs()),
        reduce=token_mean(),
        update=adam(lr=4e-7, minibatches=4),
    )
