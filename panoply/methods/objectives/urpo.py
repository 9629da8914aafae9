"""Unified Reward and Policy Optimization: one model answers, and says what its answers are worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens, own_episodes
from panoply.errors import PanoplyError
from panoply.evidence.claims import Learns
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, part
from panoply.recipes import Recipe, Stage
from panoply.regimes import OnPolicy
from panoply.registry import Published, method, recipe
from panoply.seeds import numpy_rng, stable_hash
from panoply.selves import LEARNER, acts
from panoply.slots.reward.signals import blend
from panoply.slots.sample.answers import answers_of
from panoply.slots.sample.groups import LIMITS, greedy_groups

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task

Scale = Literal["rank", "range", "plain"]


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.together > held.group:
        return [("together", f"a group has {held.group} answers")]
    if held.group == 1:
        return [("group", "scores of an answer say something only beside those of others")]
    return greedy_groups(held, method)


def _cost(held: Any, of: Lengths) -> Tokens:
    sampled, trained = own_episodes(held, of)
    calls = held.passes * held.prompts * -(-held.group // held.together)
    return sampled + calls * of.answer, trained


def _equation(held: Any) -> str:
    who = "the policy itself" if held.referee == LEARNER else held.referee
    return (
        f"{held.prompts} prompts × {held.group} episodes; of open ones {who} scores {held.together} at a time, "
        f"{held.passes} time{'s' * (held.passes > 1)}, as {held.scale}"
    )


@part(
    "sample",
    equation=_equation,
    needs=lambda held: frozenset({"world:verify", "world:referee"}) | acts(held.referee),
    gives={"signal:self", "signal:unscored"},
    cost=_cost,
    impossible=_impossible,
    bounds={
        **{name: LIMITS[name] for name in ("prompts", "group", "temperature")},
        "together": "at least 2",
        "passes": "at least 1",
        "warmup": "at least 0",
    },
)
def self_judged(
    collect: Collector,
    *,
    prompts: int = 48,
    group: int = 8,
    temperature: float = 1.0,
    together: int = 4,
    passes: int = 1,
    scale: Scale = "rank",
    referee: str = LEARNER,
    warmup: int = 0,
) -> Experience:
    """Groups of answers; those to open questions are scored by the policy, asked as a referee (arXiv 2507.17515).

    The world makes of a question and some answers to it another question, which asks for their scores. What is said to
    it is no decision that learns: scores are rewards, and no gradient goes through them. The signal `self` is an
    answer's score beside the others of its group, 0 where answers can be checked; `unscored` says that no score could
    be read, and then it counts as the mean of the others.

    together   answers a referee sees at once, in an order drawn anew each time, since it may prefer a place
    passes     how often each answer is scored; the mean counts
    scale      rank: its place among the group's, from 0 to 1; range: from the least to the most; plain: as it is
    referee    who scores: the policy that learns, or a frozen self (`reference`)
    warmup     steps without open questions, in which the referee learns
    """
    tasks = _tasks(collect, prompts, open_too=collect.version >= warmup)
    found = collect.episodes(tasks, group, temperature=temperature)
    episodes, known = found.by("episode"), {task.id: task for task in tasks}
    asked = [known[i] for i in episodes.first(found["task"]).tolist()]
    groups = episodes.first(found["group"])
    open = torch.tensor([collect.world.referee(task, ()) is not None for task in asked])
    with collect.acted_by(referee):
        scores = _scored(collect, asked, answers_of(found), groups, open, together, passes, temperature)
    unscored = open & scores.isnan()
    worth = torch.where(open, scaled(scores, groups, scale), 0.0)
    last = episodes.is_last()
    columns = {"signal:self": worth, "signal:unscored": unscored.float()}
    return found.with_columns(**{name: episodes.rows(column) * last for name, column in columns.items()})


def _tasks(collect: Collector, prompts: int, open_too: bool) -> list[Task]:
    """The next tasks, of which some must be such that answers can be checked: otherwise a referee pleases itself."""
    found: list[Task] = []
    for _ in range(100):
        some = collect.tasks(prompts)
        checked = [task for task in some if collect.world.referee(task, ()) is None]
        if not checked:
            break
        found += some if open_too else checked
        if len(found) >= prompts:
            return found[:prompts]
    raise PanoplyError(
        f"Of {prompts} tasks of {collect.world.name} not one can be checked: a policy that is its own referee has to "
        "learn from some that can. Ask for more prompts, or for other kinds of problem."
    )


def _scored(
    collect: Collector,
    tasks: Sequence[Task],
    answers: Sequence[Sequence[int]],
    groups: Tensor,
    open: Tensor,
    together: int,
    passes: int,
    temperature: float,
) -> Tensor:
    """The mean score of every answer that is open; NaN where there is none."""
    from panoply.rollout.requests import Request

    shown: list[tuple[list[int], Task]] = []
    requests = []
    for key in Segments(groups[open]).keys.tolist():
        members = ((groups == key) & open).nonzero().flatten().tolist()
        for again in range(passes):
            named = ("referee", collect.seed, key, again)
            order = numpy_rng(*named).permutation(members).tolist()
            for first in range(0, len(order), together):
                some = order[first : first + together]
                question = collect.world.referee(tasks[some[0]], [answers[i] for i in some])
                assert question is not None
                shown.append((some, question))
                requests.append(Request(question.prompt, [stable_hash(*named, first)]))
    total, times = torch.zeros(len(tasks)), torch.zeros(len(tasks))
    if requests:
        rollouts = collect.generate(requests, collect._sampling(temperature))
        collect._count(rollouts.decisions)
        for (some, question), said in zip(shown, rollouts.completions(), strict=True):
            scores = collect.world.scores(question, said)
            if scores is not None:
                total[some] += torch.tensor(scores)
                times[some] += 1
    return total / times  # 0/0 is NaN


def scaled(scores: Tensor, groups: Tensor, scale: Scale) -> Tensor:
    """Scores beside the others of a group. One that is missing counts as their mean; without any, all are 0."""
    of, there = Segments(groups), ~scores.isnan()
    known = torch.where(there, scores, 0.0)
    mean = of.sum(known) / of.sum(there.float()).clamp(min=1)
    filled = torch.where(there, known, of.rows(mean))
    if scale == "plain":
        return filled
    if scale == "range":
        least, most = -of.max(-filled), of.max(filled)
        return (filled - of.rows(least)) / of.rows(most - least).clamp(min=1e-8)
    same = groups[:, None] == groups[None]
    below = (same & (filled[None] < filled[:, None])).sum(1)
    level = (same & (filled[None] == filled[:, None])).sum(1) - 1
    return (below + level / 2) / (same.sum(1) - 1).clamp(min=1)


TINY = {**GRPO_TINY, "sample.prompts": 24, "sample.warmup": 20}
PUBLISHED: Published = {
    "the abstract and a figure": {"reward.names": ("earned", "self"), "sample.referee": LEARNER},
    "the paper, reconstructed": {
        "sample.group": 8,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "credit.baseline": "mean",
        "credit.scale": "std",
    },
}
"""No code was found, and how kinds of data are mixed, the warm-up and the form of the ranking reward are not known."""


OPEN = "area:held_out_sampled_open"
CLAIM = Learns(
    "Where the first referee is taken in by length, a policy that goes on learning to be its own gets more open "
    "questions right than one whose referee learned from rankings for twenty steps and was frozen then.",
    method="urpo",
    over="frozen-referee",
    world="referee",
    budget="steps=100",
    metric=OPEN,
    best=1.0,
    also=("held_out_sampled_rankings", "held_out_sampled_sums", "success", "total_decisions"),
    waives={"problems": "there are six open questions held out: what differs are the answers to them"},
)


@recipe("frozen-referee@1", world="referee")
def frozen_referee() -> Recipe:
    """GRPO with a frozen generative reward model, what URPO is compared with: rank first, then please who ranked.

    A copy of the policy learns from sums and rankings, is frozen, and scores what goes on from it.
    """
    return Recipe(
        (
            Stage("rank", "urpo", {"sample.warmup": 20}, {"steps": 20}),
            Stage(
                "optimise", "urpo", {"sample.warmup": 0, "sample.referee": "reference"}, {"model": "@rank"}
            ),
        )
    )


@method(
    "urpo@1",
    paper=161,
    base="grpo",
    world="referee",
    presets={"tiny": TINY},
    claim=CLAIM,
    published=PUBLISHED,
    tags=("data=rules", "data=scores", "feedback=program", "feedback=self", "reward=rule", "reward=judge"),
)
def urpo() -> OnPolicy:
    """Unified Reward and Policy Optimization (arXiv 2507.17515): the policy is its own reward model.

    One batch has three kinds of problem, and one GRPO update serves all of them: answers that can be checked, which
    earn 1[right]; rankings of given answers whose order is known, which earn Kendall's τ and make a referee of the
    policy; and open questions, whose answers earn what the policy of now, asked as that referee, says they are worth
    beside one another. A frozen reward model is pleased where it errs; this one goes on learning what is true. What is
    surprising: nothing but the other two kinds keeps the referee honest, so that a batch without them is refused.
    Scores that are all alike give no advantage. How kinds are mixed, the warm-up and the scale of self-scores are
    reconstructed.
    """
    return grpo().but(sample=self_judged(warmup=50), reward=blend(names=("earned", "self")))
