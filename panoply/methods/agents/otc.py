"""Optimal Tool Calls."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from panoply.evidence.claims import Learns, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import TINY, grpo
from panoply.methods.base.ppo import TINY as PPO_TINY
from panoply.methods.base.ppo import ppo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.regularise.terms import kl
from panoply.slots.sample.groups import groups


def efficiency(calls: Tensor, least: Tensor, c: float) -> Tensor:
    """1 for the fewest calls known to be enough, less for more: sin(π·m/(m+n)), or cos(π·m/(2m+c)) where n is 0."""
    cosine = torch.cos(math.pi * calls / (2 * calls + c))
    sine = torch.sin(math.pi * calls / (calls + least).clamp(min=1))
    return torch.where(least == 0, cosine, sine)


def _equation(held: Part) -> str:
    form, c = held.settings()["form"], held.settings()["c"]
    cosine = f"cos(π·m/(2m+{c:g}))"
    factor = cosine if form == "alone" else f"[sin(π·m/(m+n)), or {cosine} if n = 0]"
    return f"success · {factor},  m calls" + ("" if form == "alone" else ", n the fewest of a right answer")


def _inert(held: Any, method: Any) -> list[Finding]:
    return [("remember", "form alone compares with no other episode")] if held.form == "alone" else []


def _nothing() -> dict[str, Any]:
    return {"task": torch.zeros(0, dtype=torch.long), "least": torch.zeros(0)}


@part(
    "reward",
    equation=_equation,
    inert=_inert,
    state=_nothing,
    needs={"world:tools"},
    bounds={"c": "above 0", "alpha": "at least 0"},
)
def tool_efficiency(
    state: dict[str, Any],
    experience: Experience,
    *,
    form: Literal["group", "alone"] = "group",
    c: float = 4.0,
    alpha: float = 1.0,
    remember: bool = True,
) -> tuple[dict[str, Any], Tensor]:
    """Correctness times an efficiency that is 1 for the fewest calls: a wrong answer earns nothing by being cheap.

    form       `group` (OTC-GRPO) compares with the fewest calls of any right answer to the task; `alone` (OTC-PPO) with
               none at all
    c          how fast the cosine falls; the world's cap on turns
    remember   keep a task's fewest calls for when it comes again; one lucky guess without a call is then kept for good
    """
    episodes = experience.by("episode")
    calls = episodes.sum(experience["signal:calls"].float())
    right = episodes.sum(experience["signal:success"]) > 0
    task = episodes.first(experience["task"])
    if form == "alone":
        factor = efficiency(calls, torch.zeros_like(calls), c)
    else:
        known = state if remember else _nothing()
        found = Segments(torch.cat([known["task"].to(task.device), task[right]]))
        fewest = found.min(torch.cat([known["least"].to(calls), calls[right]]))
        state = {"task": found.keys, "least": fewest} if remember else state
        least = calls.clone()
        least[right] = fewest[torch.searchsorted(found.keys, task[right])]
        factor = efficiency(calls, least, c)
    return state, alpha * episodes.rows(factor) * experience["signal:success"]


CLAIM = Learns(
    "Where half of the questions need no tool and a guess at the others is right one time in a hundred, a reward that "
    "multiplies correctness by thrift takes fewer tool calls for a right answer than correctness alone, and loses at "
    "most two points of success.",
    race="thrift",
    metric="calls/success",
    lower=True,
    keeps={"success": 0.02},
    also=("calls",),
    shows=(Shows("calls", least=0.6),),
    reworded="it failed on look-ups, and where four fifths of them need none: there a guess, right one time in "
    "sixteen, is thrift as well, and what was saved in calls was lost in answers. Calculations are hardly guessed.",
)


PUBLISHED: Published = {
    "arXiv 2504.14870, §4.1": {
        "reward.form": "group",
        "reward.alpha": 1.0,
        "reward.c": 4.0,
        "reward.remember": True,
    },
    "arXiv 2504.14870, §5 (Search-R1's setting)": {
        "sample.group": 5,
        "regularise.kl.weight": 0.001,
        "update.lr": 1e-6,
    },
}


@method(
    "otc@1",
    paper=54,
    base="grpo",
    world="tools",
    presets={"tiny": {**TINY, "reward.c": 6.0}},
    claim=CLAIM,
    published=PUBLISHED,
)
def otc() -> OnPolicy:
    """OTC-PO: optimal tool calls (arXiv 2504.14870).

    The reward for a right answer is multiplied by 1 when no right answer of the group took fewer tool calls, and by
    less the more calls were wasted. The rest is GRPO. In a group of right answers only, the division by the deviation
    makes efficiency the whole of the signal: credit.scale=none keeps it small. On PPO it is `otc-ppo`.
    """
    return grpo().but(
        sample=groups(prompts=16, group=5),
        reward=tool_efficiency(),
        regularise=(kl(weight=0.001, estimator="k3"),),
    )


@method(
    "otc-ppo@1",
    base="ppo",
    world="tools",
    presets={"tiny": {**PPO_TINY, "reward.c": 6.0, "run.steps": 150}},
    published={
        "arXiv 2504.14870, §4.1": {"reward.form": "alone", "reward.alpha": 1.0, "reward.c": 4.0},
        "arXiv 2504.14870, §5 (Search-R1's setting)": {"update.lr": 1e-6},
    },
)
def otc_ppo() -> OnPolicy:
    """OTC-PPO: optimal tool calls without groups (arXiv 2504.14870).

    Success times cos(π·m/(2m + c)) for m calls: with one episode a task there is none to compare with, so every call
    costs, also one that was needed. The rest is PPO.
    """
    return ppo().but(reward=tool_efficiency(form="alone"))
