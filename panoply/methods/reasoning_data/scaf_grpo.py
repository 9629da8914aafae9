"""Scaf-GRPO: one failed answer of a group gives way to one that succeeded after the weakest hint that helps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens, own_episodes
from panoply.evidence.claims import Ranks, Shows
from panoply.evidence.races import find
from panoply.experience import Experience
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.groups import greedy_groups
from panoply.slots.sample.hints import DRAWN, steps_of
from panoply.slots.sample.repair import episodes_of, failed, replaced, tasks_of
from panoply.slots.surrogate.ratios import clip
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task, TextWorld

TIERS = {"knowledge": "knowledge", "plan": "plan", "solution": "hint"}
"""Kinds of hints, the weakest first, and what a world must have for them."""


def levels(world: TextWorld, task: Task, tiers: tuple[str, ...], chunks: int) -> list[tuple[str, Task]]:
    """A task with each of its hints, the weakest first, and the tier of each.

    Chunks add up inside of their own tier: steps of the solution stand alone, without knowledge or plan before them.
    The last step is never given. A hint that says no more than the one before, or nothing, is left out.
    """
    found: list[tuple[str, Task]] = []
    last = 1 - 1 / steps_of(world, task)
    for tier in tiers:
        before = task
        for share in (j / chunks for j in range(1, chunks + 1)):
            after = (
                world.hint(task, min(share, last)) if tier == "solution" else world.aided(task, tier, share)
            )
            if after.prompt != before.prompt:
                found.append((tier, after))
            before = after
    return found


def _equation(held: Any) -> str:
    return (
        f"{held.prompts} prompts × {held.group} episodes; where all lack {held.name}, one gives way to the success of "
        f"the weakest of {len(held.tiers) * held.chunks} hints ({' → '.join(held.tiers)}), from step {held.warmup} on"
    )


def _impossible(held: Any, method: Any) -> list[Finding]:
    order = [tier for tier in TIERS if tier in held.tiers]
    if not held.tiers or list(held.tiers) != order:
        return [("tiers", f"they are some of {', '.join(TIERS)}, in that order")]
    least = 3 if held.under == "both" else 2
    if held.group < least:
        return [("group", f"of {least - 1} replaced and one failed answer a group has at least {least}")]
    return greedy_groups(held, method)


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    if held.under == "bare" and held.tiers == ("solution",):
        return [("under", "steps of the solution stay in a bare prompt, since the answer goes on from them")]
    return []


def _cost(held: Any, of: Lengths) -> Tokens:
    sampled, trained = own_episodes(held, of)
    return sampled + held.prompts * len(held.tiers) * held.chunks * of.answer, trained


@part(
    "sample",
    equation=_equation,
    needs=lambda held: frozenset(
        {"world:verify", f"signal:{held.name}", *(f"world:{TIERS[t]}" for t in held.tiers if t in TIERS)}
    ),
    bounds={**DRAWN, "chunks": "at least 1", "warmup": "at least 0"},
    impossible=_impossible,
    inert=_inert,
    cost=_cost,
)
def scaffolded(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    max_tokens: int | None = None,
    tiers: tuple[str, ...] = tuple(TIERS),
    chunks: int = 4,
    warmup: int = 50,
    under: Literal["hint", "bare", "both"] = "hint",
    name: str = "success",
) -> Experience:
    """Groups; in one that fails as a whole an answer is replaced by one that a hint, as weak as possible, led to.

    All hints of all failing groups are asked at once, one answer each. Of a group's answers that are right then, the
    one after the weakest hint takes the place of the first failed one; where none is, the group stays as it is. In
    metrics: `failing` groups, those `rescued`, the mean `level` of the hints that did it, and the share of each tier.

    tiers: kinds of hints, the weakest first: knowledge, plan, solution
    chunks: levels of each tier, which add up inside of it
    warmup: steps in the beginning without any hints
    under: the prompt that a rescued answer is learned after: the one with the hint, as it was sampled; the bare one,
        without knowledge and plan, whose `logp` is then the policy's own there; or one answer each (6 + 1 + 1)
    name: the signal that nobody has in a group that fails
    """
    tasks = collect.tasks(prompts)
    drawn: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    found = collect.episodes(tasks, group, **drawn)
    hard = failed(found, name)[: 0 if collect.version < warmup else None]
    hints = [
        Hint(key, level, tier, plain, helped)
        for key, plain in zip(hard.tolist(), tasks_of(found, hard, tasks), strict=True)
        for level, (tier, helped) in enumerate(levels(collect.world, plain, tiers, chunks), 1)
    ]
    weakest: dict[int, tuple[Hint, int]] = {}
    if hints:
        into = torch.tensor([hint.group for hint in hints])
        tried = collect.episodes([hint.helped for hint in hints], into=into, **drawn)
        episodes = tried.by("episode")
        right = episodes.sum(tried[f"signal:{name}"]) > 0
        for hint, episode, won in zip(hints, episodes.keys.tolist(), right.tolist(), strict=True):
            if won:
                weakest.setdefault(hint.group, (hint, episode))
    used = [hint for hint, _ in weakest.values()]
    collect.notes = {"failing": len(hard) / prompts, "rescued": len(used) / prompts}
    collect.notes |= {"level": sum(hint.level for hint in used) / max(1, len(used))}
    collect.notes |= {f"by_{tier}": sum(h.tier == tier for h in used) / max(1, len(used)) for tier in tiers}
    if not used:
        return found
    saved = tried.take(
        torch.isin(tried["episode"], torch.tensor([episode for _, episode in weakest.values()]))
    )
    bare = (
        _bare(collect, saved, {h.group: h for h in used}, copied=under == "both")
        if under != "hint"
        else saved
    )
    out = _first_of(found, list(weakest), 2 if under == "both" else 1)
    return replaced(found, out, Experience.cat([bare, saved]) if under == "both" else bare)


@dataclass(frozen=True)
class Hint:
    """A hint that is tried in a group: which of its levels it is, and the task without it and with it."""

    group: int
    level: int
    tier: str
    plain: Task
    helped: Task


def _first_of(found: Experience, groups: list[int], number: int) -> Tensor:
    """The episodes that were sampled first in each of these groups, so many of each."""
    each = [episodes_of(found, torch.tensor([group]))[:number] for group in groups]
    return torch.cat(each)


def _bare(collect: Collector, saved: Experience, hints: dict[int, Hint], copied: bool) -> Experience:
    """Answers after their prompts without knowledge and plan, and how likely the policy finds them there.

    Steps of the solution stay: an answer goes on from them, and would be another one without.
    """
    groups = saved.by("context").first(saved["group"]).tolist()
    prompts = {at: (*hints[g].plain.prompt, *hints[g].helped.given) for at, g in enumerate(groups)}
    made = saved.reprompted(prompts)
    with torch.no_grad():
        scored = collect.policy.score(made, frozenset({"entropy"}))
    made = made.with_columns(**{name: scored[name].cpu() for name in ("logp", "entropy") if name in saved})
    if copied:
        episodes, first = made.by("episode"), collect.state["episodes"]
        collect.state["episodes"] += len(episodes)
        made = made.with_columns(episode=first + episodes.index)
    return made


RACE = find("wall")
CLAIM = Ranks(
    "Where no answer ever succeeds, one success a group that the weakest hint has led to teaches problems without any "
    "hint: after as many decisions Scaf-GRPO solves more of them than GRPO, which learns nothing, and more than GRPO "
    "with all but the last step given to every problem.",
    ("", RACE.baseline, "nearly all of every answer=grpo:sample=hinted,sample.share=0.875"),
    RACE.world,
    RACE.budget,
    leads=True,
    tune=RACE.tune,
    also=("success", "level", "mean:level", "failing", "rescued", "degenerate_groups", "total_episodes"),
    shows=(Shows("mean:degenerate_groups", least=0.95),),
    race="wall",
    **RACE.more,
)


TINY = {
    **GRPO_TINY,
    "sample.prompts": 16,
    "sample.tiers": ("solution",),
    "sample.chunks": 8,
    "sample.warmup": 5,
    "surrogate.dual": None,
    "update.minibatches": 1,
}
"""Small models have not learned to read knowledge or plans: the solution alone, in finer steps."""
SCRIPT = "JIA-Lab-research/Scaf-GRPO, sh/hint_mix_grpo/bs256_6k_mix.sh"
PUBLISHED: Published = {
    "arXiv 2510.19807, by notes on it": {
        "sample.tiers": ("knowledge", "plan", "solution"),
        "sample.chunks": 4,
    },
    SCRIPT: {
        "sample.prompts": 256,
        "sample.group": 8,
        "sample.temperature": 1.0,
        "sample.warmup": 50,
        "sample.under": "hint",
        "regularise.kl.weight": None,
        "update.lr": 1e-6,
        "update.weight_decay": 0.0,
        "update.minibatches": 4,
    },
    "JIA-Lab-research/Scaf-GRPO, hint_mix_grpo/config/actor/actor.yaml": {
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "surrogate.dual": 3.0,
        "reduce": "token_mean",
        "update.epochs": 1,
    },
    "JIA-Lab-research/Scaf-GRPO, hint_mix_grpo/config/ppo_trainer.yaml": {"credit.scale": "std"},
}
"""The published code leaves the plan out (`sample.tiers=knowledge,solution`), where the paper has it."""


@method("scaf-grpo@1", paper=23, base="grpo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def scaf_grpo() -> OnPolicy:
    """Scaf-GRPO (arXiv 2510.19807): where a whole group fails, one answer is replaced by a success with minimal help.

    ℓ* = min{ℓ : r(o^ℓ) = 1} with one answer o^ℓ after each hint h_ℓ, from facts over a plan to steps of the solution;
    the group is then {o_2, …, o_G, o^ℓ*}, and A = (r − mean)/std over it: √G-ish for the one success, little against
    each failure. Groups in which somebody succeeds are left alone, and so is everything in a warm-up, in which a model
    may find out by itself.

    What is surprising: answers after two different prompts are compared with one another. The replaced row is learned
    after the prompt with its hint, in ratio and old policy alike, so that the ratio starts at 1 and the hint has no
    loss; `sample.under=bare` is the authors' option to learn it after the prompt without. It is by success without
    hints that a policy is judged, and the `level` in the metrics falls as it needs less.

    Hints come from the world, not from a language model: in `chain` the facts are the products that are needed, the
    plan is the order of operations, and the solution stops a step before the answer.
    """
    return grpo().but(
        sample=scaffolded(prompts=256, group=8),
        surrogate=clip(low=0.2, high=0.2, dual=3.0),
        regularise=(),
        reduce=token_mean(),
        update=adam(lr=1e-6, minibatches=4),
    )
