"""Constrained generative policy optimization with a mixture of judges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.evidence.claims import Learns
from panoply.experience import Experience, Segments, Table
from panoply.methods.base.grpo import grpo
from panoply.parts import Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import numpy_rng
from panoply.slots.loss.pairs import logistic
from panoply.slots.reduce.averages import sequence_sum
from panoply.slots.sample.groups import LIMITS, groups
from panoply.slots.surrogate.preferences import own_weight
from panoply.slots.surrogate.ratios import log_likelihood

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


@part(
    "sample",
    equation="{prompts} prompts × {group} episodes, each beside a baseline answer",
    needs={"world:teacher"},
    bounds=LIMITS,
)
def beside_baseline(
    collect: Collector, *, prompts: int = 16, group: int = 4, temperature: float = 1.0
) -> Experience:
    """Own episodes; every signal of a demonstration of the same task stands beside theirs as `baseline:NAME`."""
    tasks = collect.tasks(prompts)
    first = collect.state["episodes"]
    experience = collect.episodes(tasks, group, temperature=temperature)
    graded = []
    for i, task in enumerate(tasks):
        answer = collect.world.demonstrate(task, numpy_rng("baseline", collect.seed, first + i))
        graded.append(collect.world.grade(task, answer))
    place = Segments(experience["group"]).index
    columns = {
        f"baseline:{name}": torch.tensor([g[name] for g in graded])[place]
        for name in (graded[0] if graded else ())
    }
    return experience.with_columns(**columns)


def _signals(held: Any) -> frozenset[str]:
    names = (held.name, *held.judges)
    return frozenset({"world:verify", "logp@reference", *(f"signal:{name}" for name in names)})


def judged(
    experience: Experience, name: str, judges: tuple[str, ...], limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Per episode: the calibrated reward σ(r − r̄), whether all judges accept, and the gate clip(1 − κ/K, 0, 1)."""
    episodes = experience.by("episode")
    reward = episodes.sum(experience[f"signal:{name}"])
    calibrated = torch.sigmoid(reward - episodes.first(experience[f"baseline:{name}"]))
    feasible = torch.ones_like(reward, dtype=torch.bool)
    for judge in judges:
        feasible &= episodes.sum(experience[f"signal:{judge}"]) > 0
    drift = episodes.sum(experience["logp"] - experience["logp@reference"])
    return calibrated, feasible, (1 - drift / limit).clamp(0, 1)


@part(
    "reward",
    equation="judges(y) · σ(r − r̄) · clip(1 − κ/{limit}, 0, 1)",
    needs=_signals,
    bounds={"limit": "any number"},
)
def constrained(
    experience: Experience, *, name: str = "proxy", judges: tuple[str, ...] = ("format",), limit: float = 20.0
) -> Tensor:
    """A reward model's word, calibrated by a baseline answer, gated by judges and by the distance to the reference.

    An answer that a judge refuses earns 0, which is below the batch's mean: that is the force of the constraint, so
    such answers stay. κ is the episode's log-ratio to the reference.
    """
    calibrated, feasible, near = judged(experience, name, judges, limit)
    episodes = experience.by("episode")
    return episodes.rows(feasible * calibrated * near) * episodes.is_last()


@part("credit", equation="A = R − mean_batch(R)")
def batch_centred(experience: Experience) -> Tensor:
    """Each episode's return less the batch's mean."""
    episodes = experience.by("episode")
    returns = episodes.sum(experience["reward"].float())
    return episodes.rows(returns - returns.mean())


def _extreme(score: Tensor, eligible: Tensor, groups: Segments, *, highest: bool) -> Tensor:
    """The episode (its place) with the extreme score among the eligible ones of each group; −1 where there is none."""
    worst = -torch.inf if highest else torch.inf
    masked = score.masked_fill(~eligible, worst)
    best = groups.rows(groups.max(masked) if highest else groups.min(masked))
    place = torch.arange(len(score))
    hit = eligible & (masked == best)
    found = groups.min(torch.where(hit, place, len(score)))
    return torch.where(found == len(score), -1, found)


@part(
    "select",
    equation="the best accepted over the worst refused answer of each group",
    needs=_signals,
    gives={"pairs"},
)
def accepted_over_refused(
    experience: Experience, *, name: str = "proxy", judges: tuple[str, ...] = ("format",)
) -> Experience:
    """Pairs for CODPO. Where all answers are accepted the worst of them is refused; where none is, the prompt goes."""
    episodes = experience.by("episode")
    score, groups = episodes.sum(experience[f"signal:{name}"]), Segments(episodes.first(experience["group"]))
    feasible = torch.ones(len(score), dtype=torch.bool)
    for judge in judges:
        feasible &= episodes.sum(experience[f"signal:{judge}"]) > 0
    all_good = groups.rows(groups.min(feasible.long()) == 1)
    chosen = _extreme(score, feasible, groups, highest=True)
    rejected = _extreme(score, ~feasible | all_good, groups, highest=False)
    both = (chosen >= 0) & (rejected >= 0) & (chosen != rejected)
    chosen, rejected = episodes.keys[chosen[both]], episodes.keys[rejected[both]]
    kept = experience.take(torch.isin(experience["episode"], torch.cat([chosen, rejected])))
    return kept.with_pairs(Table({"chosen": chosen, "rejected": rejected}))


@part(
    "select",
    equation="the best accepted answer of each group, near the reference",
    needs=_signals,
    bounds={"limit": "any number"},
)
def best_accepted(
    experience: Experience, *, name: str = "proxy", judges: tuple[str, ...] = ("format",), limit: float = 20.0
) -> Experience:
    """CRRAFT's choice: of the accepted answers with κ ≤ K the one of highest calibrated reward, which it is worth."""
    calibrated, feasible, near = judged(experience, name, judges, limit)
    episodes = experience.by("episode")
    groups = Segments(episodes.first(experience["group"]))
    best = _extreme(calibrated, feasible & (near > 0), groups, highest=True)
    kept = experience.with_columns(reward=episodes.rows(calibrated) * episodes.is_last())
    return kept.take(torch.isin(experience["episode"], episodes.keys[best[best >= 0]]))


_LOGISTIC = logistic()


def _regularised(held: Any) -> str:
    return f"−({held.loss.equation()}) + {held.nll:g}·mean log π(chosen)"


@part(
    "surrogate",
    equation=_regularised,
    unit="pair",
    scores="policy",
    inert=own_weight,
    bounds={"nll": "at least 0", "weight": "above 0"},
)
def preference_and_likelihood(
    batch: Batch, *, loss: Part = _LOGISTIC, nll: float = 5.0, weight: float | Part = 1.0
) -> Values:
    """CODPO: a pair loss, and the chosen answer's likelihood per token so that it does not fall with the other."""
    value, stats = loss(batch)
    episodes = batch.by("episode")
    chosen, _ = batch.pair_rows(episodes.mean(batch.now["logp"]))
    return nll * chosen - value, {**stats, "chosen_logp": chosen.detach()}


@part("credit", equation="A = R")
def plain_return(experience: Experience) -> Tensor:
    """Each episode's return, without a baseline."""
    episodes = experience.by("episode")
    return episodes.rows(episodes.sum(experience["reward"].float()))


TINY = {
    "sample.group": 8,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "run.steps": 150,
}


def _claim(optimiser: str) -> Learns:
    return Learns(
        f"Where a reward model is easily hacked, {optimiser} keeps to what a judge accepts: more answers are truly "
        "good than under the reward model alone.",
        race="hackable",
        also=("true", "proxy", "format"),
    )


UNOFFICIAL = "gaetanlop/trl, branch cgpo_trainer, cgpo_config.py (not the authors')"
PUBLISHED: Published = {
    "arXiv 2409.20370, eq. 14": {
        "credit": "batch_centred",
        "reduce": "sequence_sum",
        "regularise.kl.weight": None,
    },
    UNOFFICIAL: {"sample.group": 4},
}
"""The limit K of the distance to the reference is not published."""


@method(
    "cgpo@1",
    paper=83,
    base="grpo",
    world="strings",
    presets={"tiny": TINY},
    claim=_claim("a gated reward"),
    published=PUBLISHED,
    tags=("optimisation=critic-free", "optimisation=constrained"),
)
def cgpo() -> OnPolicy:
    """CGPO with CRPG (arXiv 2409.20370). R̃ = V·σ(r − r̄)·clip(1 − κ/K, 0, 1); L = −(R̃ − mean R̃)·log π.

    Constrained RLHF without a dual variable: judges say which answers are feasible, a baseline answer calibrates the
    reward model, and only what is feasible and near the reference earns.

    The paper trains several tasks at once, each with judges, reward model, optimiser and K of its own, and adds their
    gradients; here all tasks of a world share one set (`reward.judges`). Its warm-up, a few steps of DPO on the reward
    model's data, is a run of its own: `panoply train dpo`, and its folder as `--model`.
    """
    return grpo().but(
        sample=beside_baseline(),
        reward=constrained(),
        credit=batch_centred(),
        surrogate=log_likelihood(),
        reduce=sequence_sum(),
        regularise=(),
    )


@method(
    "cgpo-codpo@1",
    paper=83,
    base="cgpo",
    world="strings",
    presets={"tiny": {**TINY, "surrogate.nll": 0.2}},
    claim=_claim("preferring the best accepted answer to the worst refused one"),
    published={
        UNOFFICIAL: {"sample.temperature": 0.9, "surrogate.loss.beta": 0.1, "surrogate.nll": 5.0},
    },
    tags=(
        "data=scores",
        "data=rules",
        "feedback=annotators",
        "feedback=program",
        "reward=learned",
        "reward=rule",
        "reward=several",
        "optimisation=direct",
        "optimisation=constrained",
    ),
)
def cgpo_codpo() -> OnPolicy:
    """CGPO with CODPO: −log σ(β·(l⁺ − l⁻)) − (λ/|y⁺|)·log π(y⁺), the best feasible over the worst infeasible answer."""
    return cgpo().but(
        sample=groups(prompts=16, group=8, temperature=0.9),
        reward=grpo().reward.but(name="proxy"),
        select=(accepted_over_refused(),),
        surrogate=preference_and_likelihood(loss=logistic(beta=0.1), nll=5.0),
    )


@method(
    "cgpo-crraft@1",
    paper=83,
    base="cgpo",
    world="strings",
    claim=_claim("imitating the best accepted answer"),
    published={UNOFFICIAL: {"sample.group": 4}},
    tags=("optimisation=rejection", "optimisation=constrained"),
)
def cgpo_crraft() -> OnPolicy:
    """CGPO with CRRAFT: −R_cal(y⁺)·log π(y⁺) for the best feasible answer of each prompt.

    Where no answer is feasible the prompt is left out; the paper then imitates the baseline answer, if judges accept
    that one, with half the weight.
    """
    return cgpo().but(select=(best_accepted(),), credit=plain_return())
