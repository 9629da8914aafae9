"""Think2SQL: queries are paid by how alike their results are."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import token_mean
from panoply.slots.reward.signals import blend, signal
from panoply.slots.sample.groups import groups
from panoply.slots.schedule.schedules import constant
from panoply.slots.surrogate.ratios import clip
from panoply.slots.update.optimisers import adam

_TABLE = signal(name="table")


def _signals(*names: str) -> frozenset[str]:
    return frozenset({"world:verify", *(f"signal:{name}" for name in names)})


def _of_episodes(experience: Experience, name: str) -> Tensor:
    return experience.by("episode").sum(experience[f"signal:{name}"].float())


def _on_last(experience: Experience, worth: Tensor) -> Tensor:
    episodes = experience.by("episode")
    return episodes.rows(worth) * episodes.is_last()


# ------------------------------------------------------------------ rewards of the study's variants


def _least_impossible(held: Any, method: Any) -> list[Finding]:
    rising = list(held.buckets) == sorted(set(held.buckets))
    if not rising or (held.buckets and held.buckets[0] > held.floor):
        return [("buckets", f"they rise, and the first is at most the floor, {held.floor:g}")]
    return []


@part(
    "reward",
    equation="max({floor}, {name}) if ran else 0",
    needs=lambda held: _signals(held.name, "ran"),
    impossible=_least_impossible,
    bounds={"floor": "from 0 to 1", "buckets": "from 0 to 1"},
)
def at_least(
    experience: Experience, *, name: str = "table", floor: float = 0.1, buckets: tuple[float, ...] = ()
) -> Tensor:
    """A signal, but something for every query that runs and nothing for one that does not: 0, then max(0.1, r).

    With `name=success` it is 1 for a right result, 0.1 for a query that runs, and 0 (Arctic-Text2SQL-R1).

    buckets: numbers that it is rounded down to, such as 0.1, 0.5, 0.8, 0.9, 1; none keeps it as it is
    """
    ran, worth = (_of_episodes(experience, name) for name in ("ran", name))
    worth = worth.clamp(min=floor)
    if buckets:
        steps = torch.tensor(buckets, device=worth.device)
        worth = steps[torch.searchsorted(steps, worth + 1e-6).clamp(min=1) - 1]
    return _on_last(experience, torch.where(ran > 0, worth, 0.0))


@part(
    "reward",
    equation="±1 ended, then ±2 ran, then ±3 success and up to {bonus} for length",
    needs=_signals("ended", "ran", "success"),
    bounds={"limit": "at least 1", "bonus": "at least 0"},
)
def ladder(experience: Experience, *, limit: int = 2048, bonus: float = 0.5) -> Tensor:
    """SQL-R1's reward: a rung counts once the one below it is reached, and of right answers longer ones earn more.

    A query adds 1 more for its share of the answer, which is 1 where nothing stands beside it.

    limit: the length, in tokens, from which on the bonus is whole
    bonus: what length adds to a right answer at most
    """
    ended, ran, right = (_of_episodes(experience, name) > 0 for name in ("ended", "ran", "success"))
    length = (experience.by("episode").count / limit).clamp(max=1.0) * bonus + 1.0
    result = torch.where(right, 3.0 + length, -3.0)
    execution = torch.where(ran, 2.0 + result, -2.0)
    return _on_last(experience, torch.where(ended, 1.0 + execution, -1.0))


@part(
    "reward",
    equation=lambda held: f"{held.reward.equation()} − min({held.most:g}, {held.strength:g}·max(0, z(|y|)))",
    bounds={"strength": "at least 0", "most": "at least 0", "right": "from 0 to 1", "spread": "above 0"},
)
def no_longer(
    experience: Experience,
    *,
    reward: Part = _TABLE,
    strength: float = 0.1,
    most: float = 0.9,
    right: float = 0.5,
    spread: float = 0.2,
) -> Tensor:
    """A reward less a penalty for answers longer than the right ones of their group, and never below 0.

    z is (|y| − mean)/std of the lengths of the group's right answers; nothing is taken where there are fewer than two.

    right: the reward above which an answer counts as right
    spread: the least std, as a share of the mean
    """
    earned, episodes = reward(experience).float(), experience.by("episode")
    worth, length = episodes.sum(earned), episodes.count.float()
    groups = Segments(episodes.first(experience["group"]))
    counts = (worth > right).float()
    among = groups.sum(counts)
    mean = groups.sum(counts * length) / among.clamp(min=1)
    square = groups.sum(counts * (length - groups.rows(mean)) ** 2)
    std = torch.maximum((square / (among - 1).clamp(min=1)).sqrt(), spread * mean)
    z = (length - groups.rows(mean)) / groups.rows(std).clamp(min=1e-6)
    penalty = (strength * z).clamp(0.0, most) * (groups.rows(among) >= 2) * (worth > 0)
    taken: Tensor = torch.minimum(penalty, worth.clamp(min=0.0))
    return cast(Tensor, earned - _on_last(experience, taken))


# ------------------------------------------------------------------ the method

TINY = {
    "sample.prompts": 16,
    "sample.group": 8,
    "sample.temperature": 1.0,
    "sample.top_p": 1.0,
    "sample.top_k": 0,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "update.clip": 1.0,
    "run.steps": 60,
}

CLAIM = Learns(
    "Where one query in a hundred is right to begin with, so that most groups have none, paying for the values and "
    "rows that a result shares with the wanted one learns more from as many answers than paying for the same result "
    "alone.",
    over="exact results=think2sql:reward.names=success,ended",
    world="program:sql-hard",
    budget="episodes=7680",
    also=("success", "held_out_sampled_two tables", "mean:degenerate_groups"),
    shows=(Shows("mean:degenerate_groups", least=0.2),),
)

PUBLISHED: Published = {
    "spapicchio/Think2SQL, config/config_train_grpo.yaml": {
        "sample.group": 16,
        "sample.temperature": 0.6,
        "sample.top_p": 0.95,
        "sample.top_k": 20,
        "surrogate.high": 0.28,
        "credit.scale": "batch_std",
        "reduce": "token_mean",
        "regularise.kl.weight": None,
        "reward.weights": (0.85, 0.15),
        "update.lr": 1e-6,
        "update.clip": 0.2,
        "update.schedule.warmup": 0.1,
    },
    "spapicchio/Think2SQL, scripts/grpo.sh": {
        "sample.prompts": 32,
    },
    "arXiv 2504.15077": {
        "reward.names": ("table", "ended"),
    },
}
"""256 answers in a batch of the script are 32 prompts of the 8 answers that it has there. The weights are the
configuration's; the script's are others again. Its ratio of whole answers is `surrogate=sequence_clip`."""


@method(
    "think2sql@1",
    paper=181,
    base="grpo",
    world="program",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
)
def think2sql() -> OnPolicy:
    """Think2SQL (arXiv 2504.15077). R = 0.85·(CP + CR + TC)/3 + 0.15·form, of the tables that two queries give.

    A query is right when its result is, however it is written; and a result may be nearly right. CP is the share of
    its values that the wanted table has, CR the share of wanted values that it has, TC the smaller number of rows
    over the larger; a query that does not run earns 0. So groups in which no answer is right still tell better from
    worse, most of all on questions that need several tables. What is surprising: a query that selects everything
    has CR = 1, and only CP and TC keep it from being paid; and rewards that are graded help small models, while
    large ones learn as well from results that are the same or not (`reward.names=success,ended`). Advantages are in
    deviations of the batch, the average is over tokens, the upper bound is 1.28, and there is no KL term. The
    study's other rewards are parts: `at_least` (something for every query that runs; Arctic's with `name=success`),
    `ladder` (SQL-R1's) and `no_longer` (a price on length among right answers).

    Its form of an answer, tags around reasoning and query, is here that an answer ends; tables that are compared as
    sets of values are QATCH's, and `success` counts how often a row comes, where BIRD's evaluation does not.
    Queries of this world order nothing. Imitation first is the world's start, `--model fresh` is without; traces of
    reasoning, and the recall of tables and columns that are named before the query, which the script has rewards
    for, are not built.
    """
    return grpo().but(
        sample=groups(prompts=32, group=16, temperature=0.6, top_p=0.95, top_k=20),
        reward=blend(names=("table", "ended"), weights=(0.85, 0.15)),
        credit=group(baseline="mean", scale="batch_std"),
        surrogate=clip(low=0.2, high=0.28),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=1e-6, clip=0.2, schedule=constant(warmup=0.1)),
    )
