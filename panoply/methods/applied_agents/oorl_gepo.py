"""OORL: reinforcement learning on own answers, and beside it preferences between groups of equivalent ones (GEPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from panoply.batch import Batch, Values
from panoply.costs import Lengths, Tokens, own_episodes
from panoply.evidence.claims import Learns, Shows
from panoply.experience import SYNTHETIC, Experience, Segments
from panoply.methods.base.reinforce_plus_plus import TINY as PLUS_TINY
from panoply.methods.base.reinforce_plus_plus import reinforce_plus_plus
from panoply.parts import Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.seeds import numpy_rng, stable_hash
from panoply.slots.loss.pairs import episode_scores, snapshot_needs
from panoply.slots.sample.groups import LIMITS
from panoply.slots.sample.taught import verified
from panoply.slots.schedule.schedules import cosine
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


# ------------------------------------------------------------------ groups of equivalents beside own answers


def _cost(held: Any, of: Lengths) -> Tokens:
    sampled, trained = own_episodes(held, of)
    return sampled, trained + held.sets * (of.prompt + (held.right + held.wrong) * of.context)


@part(
    "sample",
    equation=(
        "{prompts} prompts × {group} episodes, and {sets} of {pool} sets of {right} right and {wrong} wrong answers"
    ),
    needs={"world:teachers", "world:teacher"},
    bounds={
        **{name: LIMITS[name] for name in ("prompts", "group", "temperature")},
        "sets": "at least 1",
        "right": "at least 1",
        "wrong": "at least 1",
        "pool": "at least 1",
    },
    gives={"stream:synthetic", "column:right"},
    cost=_cost,
)
def with_equivalents(
    collect: Collector,
    *,
    prompts: int = 8,
    group: int = 1,
    sets: int = 32,
    right: int = 3,
    wrong: int = 3,
    pool: int = 9600,
    temperature: float = 1.0,
) -> Experience:
    """Own episodes, and sets of given answers to other tasks as a synthetic stream, which never change.

    right   answers of a set that are right, and so equivalent: those of the world's teachers (`world.solutions`)
    wrong   broken ones (`world.wrong_answers`). Either may be fewer where a task has fewer
    sets    how many a step has, drawn anew from those of `pool` tasks

    Both sides are checked by the world's verifier. The column `right` says which side an answer is on.
    """
    own = collect.episodes(collect.tasks(prompts), group, temperature=temperature)
    first = stable_hash("sets", collect.seed) >> 16
    rng = numpy_rng("sets", collect.seed, collect.version)
    drawn = rng.choice(pool, min(sets, pool), replace=False)
    tasks = [collect.world.task(collect.split, first + int(i)) for i in drawn]
    given = [
        (number, task, answer, side)
        for number, task in enumerate(tasks)
        for side, answers in _sides(collect, task, right, wrong)
        for answer in answers
    ]
    keys = collect.state["groups"] + torch.tensor([number for number, *_ in given])
    collect.state["groups"] += len(tasks)
    theirs = collect.answers(
        [task for _, task, _, _ in given], [answer for _, _, answer, _ in given], into=keys, source=SYNTHETIC
    )
    episodes = theirs.by("episode")
    sides = torch.tensor([side for *_, side in given], device=episodes.index.device)
    return Experience.mix([own, theirs.with_columns(right=episodes.rows(sides))])


def _sides(collect: Collector, task: Any, right: int, wrong: int) -> list[tuple[float, list[list[int]]]]:
    """The right answers of a task and the wrong ones; none at all where a side is empty."""
    good = verified(collect.world, task)[:right]
    bad = collect.world.wrong_answers(task, wrong, numpy_rng("wrong", collect.seed, task.id))
    return [(1.0, good), (0.0, bad)] if good and bad else []


# ------------------------------------------------------------------ what is asked of them


@part(
    "regularise",
    equation=lambda held: (
        f"−log σ({held.beta:g}·(mean ℓ of right − mean ℓ of wrong)) + {held.spread:g}·Var(ℓ of right),  "
        f"ℓ = {'mean' if held.per_token else 'Σ'} log π/π_{held.to}"
    ),
    unit="group",
    stream="synthetic",
    scores="policy",
    needs=lambda held: snapshot_needs(held) | {"column:right"},
    bounds={"weight": "at least 0", "beta": "above 0", "spread": "at least 0"},
)
def group_preference(
    batch: Batch,
    *,
    weight: float | Part = 0.01,
    beta: float = 0.1,
    spread: float = 1.0,
    to: str = "reference",
    per_token: bool = False,
) -> Values:
    """GEPO: one preference for a whole set, right answers over wrong ones, and equal log-ratios among the right ones.

    The means are inside of the sigmoid, so that a set of one pair is DPO. The variance is over log-ratios and not over
    log-probabilities, which differ between equivalents of unequal length by nature; at the start all ratios are 0, and
    it has no gradient.

    spread      λ, the weight of that variance (over n)
    per_token   whether ℓ is a mean over tokens: a sum's variance grows with the length
    """
    ratio, episodes = episode_scores(batch, to, per_token), batch.by("episode")
    right = episodes.first(batch["right"]).to(ratio.dtype)
    sets = Segments(episodes.first(batch["group"]))
    winners, losers = sets.sum(right), sets.sum(1 - right)
    mean = sets.sum(ratio * right) / winners
    margin = beta * (mean - sets.sum(ratio * (1 - right)) / losers)
    variance = sets.sum(right * (ratio - sets.rows(mean)) ** 2) / winners
    stats = {
        "set_margin": margin.detach(),
        "set_accuracy": (margin > 0).float(),
        "set_spread": variance.detach().sqrt(),
    }
    return -F.logsigmoid(margin) + spread * variance, stats


# ------------------------------------------------------------------ the method

CLAIM = Learns(
    "Translations learn more from own answers with sets of equivalent and of broken ones beside them than from own "
    "answers alone, in as many own answers.",
    over="reinforce++",
    world="program:ir",
    budget="episodes=5120",
    metric="success",
    shows=(Shows("success", most=0.95),),
    also=("area", "set_accuracy", "set_spread"),
)

TINY = {
    **PLUS_TINY,
    "sample.prompts": 128,
    "sample.sets": 16,
    "sample.pool": 256,
    "update.schedule": "constant",
}
PUBLISHED: Published = {
    "reported of arXiv 2505.12723": {
        "regularise.group_preference.weight": 0.01,
        "regularise.group_preference.spread": 1.0,
        "sample.prompts": 8,
        "sample.pool": 9600,
        "update.lr": 5e-7,
        "update.schedule": "cosine",
        "update.schedule.warmup": 0.03,
    },
}
"""β is DPO's and the sizes of sets are ours: the text that was read has neither. With 9600 sets and 2400 problems in
one epoch there are four sets to a problem."""


@method(
    "oorl-gepo@1",
    paper=1,
    base="reinforce++",
    world="program:ir",
    claim=CLAIM,
    presets={"tiny": TINY},
    published=PUBLISHED,
)
def oorl_gepo() -> OnPolicy:
    """OORL with GEPO (arXiv 2505.12723): L = REINFORCE++ on own answers + 0.01·GEPO on sets of equivalent ones.

    A reward of 0 or 1 for tests that pass says nothing of what programs mean. Sets do: the same source lowered to an
    intermediate language in several ways, all of them right, and copies with an operand or an operator changed, all of
    them wrong. One optimiser step descends both; each stream is averaged by its own count, so 0.01 is a true weight.
    What is surprising is how small it is: the variance is of sums over tokens.

    The paper lowers C with a compiler at several levels of optimisation; here any world whose teachers have several
    right answers will do, and `program:ir` has them by rewriting. Neither β nor whether it is inside of the variance is
    legible in the text that was read: it is 0.1 as in DPO, and outside.
    """
    return reinforce_plus_plus().but(
        sample=with_equivalents(),
        regularise=(group_preference(),),
        update=adam(lr=5e-7, schedule=cosine(warmup=0.03)),
    )
