"""ADORA: how much a group counts is decided anew in every step, by what its own answers show."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.evidence.claims import Ranks, Shows
from panoply.evidence.races import find
from panoply.experience import TRUNCATED, Experience, Segments
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import episode_returns, group
from panoply.slots.regularise.terms import kl
from panoply.slots.sample.groups import groups
from panoply.slots.update.optimisers import adam

_GROUP = group()


def length_advantage(right: Tensor, wrong: Tensor, length: Tensor, asked: Segments, edges: str) -> Tensor:
    """Whether the longest right answer of each group is longer than its wrong ones are on average."""
    inside = length.double()
    longest = asked.max(inside.masked_fill(~right, -torch.inf))
    mean = asked.sum(inside * wrong) / asked.sum(wrong.double())
    any_right, any_wrong = asked.sum(right.double()) > 0, asked.sum(wrong.double()) > 0
    longer = any_right & any_wrong & (longest > mean)
    return longer | (any_right & ~any_wrong) if edges == "logic" else longer | ~any_right


def _equation(held: Any) -> str:
    rule = "max |right| > mean |wrong|" if held.by == "length" else f"share of right answers < {held.hard:g}"
    return f"{held.credit.equation()}, times {held.advantageous:g} if {rule} else {held.disadvantageous:g}"


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    if held.by == "difficulty":
        return [(name, "by is difficulty") for name in ("cut", "edges")]
    found: list[Finding] = [("hard", "by is length")]
    longest = getattr(world, "max_tokens", 0) * getattr(world, "turn_cap", 1)
    if held.cut is not None and 0 < longest < held.cut:
        found.append(("cut", f"no episode of {world.name} is as long as {held.cut}"))
    return found


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.credit.info.state is not None:
        return [("credit", f"{held.credit.info.id} remembers, and a credit inside of another cannot")]
    if held.advantageous == held.disadvantageous:
        return [("advantageous", "all groups would count the same")]
    return []


@part(
    "credit",
    equation=_equation,
    inert=_inert,
    impossible=_impossible,
    bounds={
        "advantageous": "at least 0",
        "disadvantageous": "at least 0",
        "correct": "any number",
        "cut": "at least 1",
        "hard": "from 0 to 1",
    },
)
def utility_weighted(
    experience: Experience,
    *,
    credit: Part = _GROUP,
    advantageous: float = 1.0,
    disadvantageous: float = 0.1,
    by: Literal["length", "difficulty"] = "length",
    correct: float = 0.5,
    cut: int | None = 4094,
    edges: Literal["vision", "logic"] = "vision",
    hard: float = 0.5,
    whose: Literal["own", "next"] = "own",
) -> Any:
    """Another credit, times a weight for each group that its own answers decide, in this step alone (ADORA).

    The weight comes after the division by a deviation, which would cancel it.

    by: a group is advantageous where its longest right answer is longer than its wrong ones on average (length), or
        where few answers are right (difficulty)
    correct: an answer is right if its return is above this
    cut: wrong answers of this length and above do not count; none: those that were cut off
    edges: where one side is missing. `vision`: without right answers a group is advantageous, with nothing but right
           ones it is not; `logic`: the other way round
    hard: of difficulty, the share of right answers below which a group is advantageous
    whose: `next` gives every group the weight of the next one, for a comparison: as many are damped, but not those
    """
    returns, asked = episode_returns(experience)
    episodes = experience.by("episode")
    right = returns > correct
    if by == "difficulty":
        useful = asked.mean(right.double()) < hard
    else:
        over = episodes.max(experience["end"]) == TRUNCATED if cut is None else episodes.count >= cut
        useful = length_advantage(right, ~right & ~over, episodes.count, asked, edges)
    useful = useful.roll(-1) if whose == "next" else useful
    weight = torch.where(useful, advantageous, disadvantageous)
    weight = episodes.rows(asked.rows(weight))
    found = credit(experience)
    if isinstance(found, dict):
        return {**found, "advantage": found["advantage"] * weight.to(found["advantage"].dtype)}
    return found * weight.to(found.dtype)


TINY = {
    "credit.cut": None,
    "sample.prompts": 16,
    "surrogate.high": 0.28,
    "reduce": "token_mean",
    "regularise.kl": "none",
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "update.weight_decay": 0.0,
    "update.minibatches": 1,
    "run.steps": 150,
}


THRIFT = find("thrift")
CLAIM = Ranks(
    "Where a fifth of the questions need look-ups, so that right answers are longer in some groups and not in others, "
    "damping the others learns more from as many episodes than GRPO, and more than damping as many that are not those.",
    ("", "next=adora:credit.whose=next", THRIFT.baseline),
    THRIFT.world,
    "episodes=3840",
    settings=THRIFT.settings,
    tune=THRIFT.tune,
    leads=True,
    also=("success", "episode_length", "total_decisions"),
    shows=(Shows("mean:degenerate_groups", most=0.7),),
)


PUBLISHED: Published = {
    "ShadeCloak/ADORA, ADORA_VL/openrlhf/trainer/ppo_utils/experience_maker_vl.py": {
        "credit.disadvantageous": 0.1,
        "credit.advantageous": 1.0,
        "credit.correct": 0.5,
        "credit.cut": 4094,
        "credit.credit.epsilon": 1e-9,
    },
    "ShadeCloak/ADORA, ADORA_VL/examples/scripts/qwen25vl_7b_geo3k_adora.sh": {
        "sample.prompts": 128,
        "sample.group": 8,
        "regularise.kl.weight": 0.001,
        "regularise.kl.estimator": "k3",
        "update.lr": 1e-6,
        "update.weight_decay": 0.01,
        "update.epochs": 1,
        "update.minibatches": 8,
    },
}
"""Of the two releases the one for vision, whose threshold fits rewards of 0 and 1. That for logic puzzles has
correct=1.01, cut=4054 and edges=logic; its rewards go up to 3."""


@method("adora@1", paper=62, base="grpo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def adora() -> OnPolicy:
    """ADORA (arXiv 2602.10019). A = w·(R − mean)/(std + ε), w = 1 or 0.1 for a whole group, by its own answers.

    A prompt is worth learning from now if thinking longer helps in it now: its longest right answer is longer than its
    wrong ones on average, those at the limit left out. Others are damped and not dropped; nothing is remembered from
    step to step. The rule is a taste for length, so answers may grow without need: watch `episode_length`.

    The two releases treat a missing side in opposite ways (`credit.edges`). For strong models the paper does not damp
    but amplifies, `credit.advantageous=2`, `credit.disadvantageous=1`, and may go by difficulty, `credit.by`; both are
    reconstructed from a summary, as are 2 and `credit.hard`. Any credit can be weighted: `credit.credit`.
    """
    return grpo().but(
        sample=groups(prompts=128, group=8),
        credit=utility_weighted(credit=group(epsilon=1e-9)),
        regularise=(kl(weight=0.001, estimator="k3"),),
        update=adam(lr=1e-6, weight_decay=0.01, minibatches=8),
    )
