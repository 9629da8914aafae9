"""A²FM: one model that chooses how to answer, and APO, which teaches it to choose the cheapest way that works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens
from panoply.evidence.claims import Ranks, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import TINY, grpo
from panoply.parts import Finding, part
from panoply.recipes import Recipe, Stage
from panoply.regimes import OnPolicy
from panoply.registry import Published, method, recipe
from panoply.slots.sample.groups import LIMITS

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

FREE = -1
"""In the column `forced`: who chose the mode itself. Others have the number of the mode that was chosen for them."""


def _greedy(held: Any, method: Any) -> list[Finding]:
    if held.temperature == 0:
        return [("temperature", "all answers in a mode would be the same")]
    return []


def _cost(held: Any, of: Lengths) -> Tokens:
    """Three modes, each of which has a prompt of its own: with its letter."""
    rows = held.prompts * (3 * held.forced + held.free)
    return rows * of.answer, 4 * held.prompts * of.prompt + rows * of.context


@part(
    "sample",
    equation="{prompts} prompts × ({forced} answers in each mode + {free} in a mode of the policy's choice)",
    needs={"world:modes", "world:verify"},
    gives={"column:forced"},
    cost=_cost,
    impossible=_greedy,
    bounds={
        **{name: LIMITS[name] for name in ("prompts", "temperature")},
        "forced": "at least 1",
        "free": "at least 1",
    },
)
def routed(
    collect: Collector, *, prompts: int = 16, forced: int = 3, free: int = 3, temperature: float = 1.0
) -> Experience:
    """A group for each prompt in which some answers have their mode chosen for them, as many for each mode.

    The letter of a mode that is forced belongs to the prompt: nobody drew it, and it does not learn. So every mode is
    practised however seldom the policy would choose it, and what each can do is known for every prompt.

    forced   answers in each of the world's modes
    free     answers whose mode the policy chooses: only these teach it to choose
    """
    world: Any = collect.world
    tasks = collect.tasks(prompts)
    found = [collect.episodes(tasks, free, temperature=temperature)]
    keys = found[0].by("group").keys
    chosen = [torch.full((len(found[0]),), FREE)]
    for number, way in enumerate(world.ways):
        begun = [world.in_mode(task, way) for task in tasks]
        found.append(collect.episodes(begun, forced, temperature=temperature, into=keys))
        chosen.append(torch.full((len(found[-1]),), number))
    return Experience.cat(found).with_columns(forced=torch.cat(chosen))


@part(
    "reward",
    equation="success · well-formed · (1 − p^{alpha} where a dearer mode was chosen),  p of forced {cheap} answers",
    needs=lambda held: frozenset(
        {"world:verify", "column:forced", "signal:success", "signal:malformed", f"signal:{held.cheap}"}
    ),
    bounds={"alpha": "above 0"},
)
def adaptive(experience: Experience, *, alpha: float = 2.0, cheap: str = "instant") -> Tensor:
    """Success, worth the less in a mode that was chosen without need, on the last decision.

    p is how often the answers that were made to use the cheapest mode were right, of the same prompt. An answer that
    chose a dearer one is worth 1 − p^α of success; nobody is blamed for a mode that was chosen for it. All factors are
    multiplied, so that a cheap answer that is wrong earns nothing.

    alpha   above 1 it forgives dear modes on prompts that are only sometimes solved cheaply
    cheap   the signal that is 1 in the cheapest mode
    """
    episodes = experience.by("episode")
    right = episodes.sum(experience["signal:success"].float())
    broken = episodes.sum(experience["signal:malformed"].float()) > 0
    instant = episodes.sum(experience[f"signal:{cheap}"].float()) > 0
    free = episodes.first(experience["forced"]) == FREE
    groups = Segments(episodes.first(experience["group"]))
    tried = (instant & ~free).float()
    p = groups.rows(groups.sum(right * tried) / groups.sum(tried).clamp(min=1))
    factor = torch.where(free & ~instant, 1 - p**alpha, torch.ones_like(p))
    return episodes.rows(right * factor * ~broken) * episodes.is_last()


@part(
    "reward",
    equation="success − {weight}·{name}",
    needs=lambda held: frozenset({"world:verify", "signal:success", f"signal:{held.name}"}),
    bounds={"weight": "at least 0"},
)
def less_cost(experience: Experience, *, weight: float = 0.01, name: str = "cost") -> Tensor:
    """What APO is compared with: a price on every answer, whatever cheaper ones would have done."""
    episodes = experience.by("episode")
    earned = episodes.sum(
        experience["signal:success"].float() - weight * experience[f"signal:{name}"].float()
    )
    return episodes.rows(earned) * episodes.is_last()


CLAIM = Ranks(
    "Where problems can be answered at once, reasoned through or handed to a tool, at prices of 1, 5 and 20, "
    "practising every mode and paying a dear one the less the more often the cheap one works makes a right answer "
    "cheaper than GRPO does, and cheaper than GRPO with a fixed price.",
    ("", "grpo", "a fixed price=grpo:reward=a2fm-apo/less_cost"),
    world="routes",
    budget="episodes=7680",
    metric="world:per-right",
    lower=True,
    leads=True,
    also=("success", "instant", "agentic"),
    best=1.0,
    shows=(Shows("cost", least=4.0),),
)
PUBLISHED: Published = {
    "reported of arXiv 2510.12838, §3.3": {
        "sample.forced": 3,
        "sample.free": 3,
        "reward.alpha": 2.0,
    },
}
"""No code of the training is released: how factors are put together, and ρ = γ = 3, are reconstructed."""


@method(
    "a2fm-apo@1",
    paper=75,
    base="grpo",
    world="routes",
    presets={"tiny": {k: v for k, v in TINY.items() if k != "sample.group"}},
    claim=CLAIM,
    published=PUBLISHED,
)
def a2fm_apo() -> OnPolicy:
    """Adaptive Policy Optimization, of A²FM (arXiv 2510.12838): the cheapest way to answer that works.

    A policy first says how it will answer (at once, by reasoning, with tools), then does. In the group of a prompt each
    way is forced ρ times and γ answers choose for themselves. A right answer that chose a dearer way than the cheapest
    is worth 1 − p^α, with p how often forced cheap answers to the same prompt were right; advantages are GRPO's over
    the whole group. The free ones teach the choice; the forced ones, whose first letter nobody drew, teach each way.

    Surprising: with three forced answers p is 0, ⅓, ⅔ or 1, so what a dear way loses is 0, 11 %, 44 % or all. On a
    prompt that only tools solve, forced answers with tools stand out in the group, and that is meant.
    """
    return grpo().but(sample=routed(), reward=adaptive())


@recipe("a2fm@1", world="routes")
def a2fm() -> Recipe:
    """A²FM (arXiv 2510.12838): imitation of answers in every mode, each with its letter before it, then APO.

    The teachers of the paper are large models, one for each way; here it is the world's, who answers in any of them.
    """
    return Recipe(
        (
            Stage("imitate", "sft", options={"model": "fresh"}),
            Stage("route", "a2fm-apo", options={"model": "@imitate"}),
        )
    )
