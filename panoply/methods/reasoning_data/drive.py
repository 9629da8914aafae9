"""DRIVE: first broadly with few answers a prompt, then on the few hardest prompts with many, and on ever fewer."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens
from panoply.errors import PanoplyError
from panoply.evidence.claims import Ranks, Shows
from panoply.experience import Experience, Segments
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.rollout.collector import in_epochs
from panoply.slots.sample.groups import LIMITS, greedy_cuts, greedy_groups

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

AT_ONCE = 2048
"""Answers of an estimate that are sampled together."""


def hardest(rate: Tensor, n: int, solvable: bool) -> Tensor:
    """Places of the n lowest success rates, the first of equals; with `solvable`, of those above 0."""
    there = (rate > 0 if solvable else rate >= 0).nonzero().flatten()
    return there[rate[there].argsort(stable=True)[:n]].sort().values


def _no_hard_prompt(rate: Tensor, answers: int, solvable: bool) -> str:
    """Why nothing is left to be chosen from a pool."""
    if bool((rate == 1).all()):
        return (
            f"None of the {len(rate)} prompts of the pool fails in {answers} answers, so that there are no hard ones "
            "to go on with: raise sample.pool, or shorten the first stage (sample.phases)."
        )
    if solvable and not bool((rate > 0).any()):
        return (
            f"Not one of the {len(rate)} prompts of the pool is solved in {answers} answers, so that nothing could be "
            "learned from the hardest: raise sample.estimate, or lengthen the first stage (sample.phases)."
        )
    return ""


def _cost(held: Any, of: Lengths) -> Tokens:
    """Of the larger of the two stages; estimates come on top, a few times a run."""
    steps = ((held.prompts, held.group), (held.hard_prompts, held.hard_group))
    return (
        max(p * g * of.answer for p, g in steps),
        max(p * (of.prompt + g * of.context) for p, g in steps),
    )


def _impossible(held: Any, method: Any) -> list[Finding]:
    found = greedy_groups(held, method)
    if len(held.sizes) != len(held.phases) - 1:
        found.append(
            ("sizes", f"{len(held.phases)} phases are the broad one and {len(held.phases) - 1} others")
        )
    if any(b > a for a, b in zip((held.pool, *held.sizes), held.sizes, strict=False)):
        found.append(
            ("sizes", f"a phase keeps some of the one before it, the first of {held.pool} (sample.pool)")
        )
    if None not in (held.window, held.max_tokens) and held.window > held.max_tokens:
        found.append(
            ("window", f"it is longer than the answers after it, of at most {held.max_tokens} tokens")
        )
    if held.sizes and held.hard_prompts > min(held.sizes):
        found.append(("hard_prompts", f"the last phase has {min(held.sizes)} prompts in all"))
    return found


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    found = greedy_cuts(held, method, world)
    longest = getattr(world, "max_tokens", 0)
    if held.window is not None and 0 < longest <= held.window:
        found.append(("window", f"no answer of {world.name} is longer than {longest}"))
    if not held.sizes:
        rest = ("pool", "hard_prompts", "hard_group", "estimate", "solvable")
        found += [(name, "there is but the broad phase") for name in rest]
    return found


@part(
    "sample",
    equation=lambda held: (
        f"{held.phases[0]} steps of {held.prompts} prompts × {held.group} episodes, then "
        + ", ".join(
            f"{steps} on the {n} of lowest p̂" for steps, n in zip(held.phases[1:], held.sizes, strict=False)
        )
        + f", {held.hard_prompts} × {held.hard_group}"
    ),
    state=dict,
    needs={"world:verify", "signal:success"},
    bounds={
        **LIMITS,
        "pool": "at least 1",
        "phases": "at least 1",
        "sizes": "at least 1",
        "hard_prompts": "at least 1",
        "hard_group": "at least 2",
        "estimate": "at least 1",
        "window": "at least 1",
    },
    impossible=_impossible,
    inert=_inert,
    cost=_cost,
)
def broad_then_hardest(
    state: dict[str, Any],
    collect: Collector,
    *,
    prompts: int = 128,
    group: int = 8,
    phases: tuple[int, ...] = (32, 64, 32, 32),
    sizes: tuple[int, ...] = (72, 50, 25),
    pool: int = 175,
    hard_prompts: int = 25,
    hard_group: int = 64,
    estimate: int = 64,
    solvable: bool = False,
    window: int | None = 24576,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    max_tokens: int | None = None,
) -> tuple[dict[str, Any], Experience]:
    """New prompts with few episodes each; after some steps the hardest of a pool with many, then the hardest of those.

    When a phase begins, the policy of that moment answers all prompts that are left, and those it solves least often
    are kept. These answers count as episodes, and nothing is learned from them. The last phase goes on to the end.
    Metrics: `phase`, 0 while it is broad; `hard_rate`, how often the policy solved what is kept when the phase began.

    phases         steps of the broad stage and of each phase after it
    sizes          prompts that each of these keeps
    pool           prompts of which the first of them chooses
    hard_prompts   of those that are kept, how many are asked in a step, in turn
    hard_group     episodes for each
    estimate       answers by which a prompt's success rate is estimated
    solvable       whether prompts that were never solved are left out
    window         the longest answer of the broad stage, shorter than `max_tokens`, that of the others
    """
    sampling: dict[str, Any] = {
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }  # fmt: skip
    step = state.get("step", 0)
    phase = min(sum(step >= end for end in accumulate(phases)), len(sizes))
    state = {**state, "step": step + 1}
    if phase == 0:
        collect.notes = {"phase": 0.0}
        return state, collect.episodes(collect.tasks(prompts), group, max_tokens=window, **sampling)
    every = collect.pool(pool)
    if phase > state.get("phase", 0):
        before = state.get("kept", torch.arange(pool))
        rate = _rates(collect, [every[i] for i in before.tolist()], estimate, max_tokens, sampling)
        if phase == 1 and (why := _no_hard_prompt(rate, estimate, solvable)):
            raise PanoplyError(why)
        chosen = hardest(rate, sizes[phase - 1], solvable and bool((rate > 0).any()))
        state |= {"phase": phase, "kept": before[chosen], "rate": float(rate[chosen].mean()), "asked": 0}
    collect.notes = {"phase": float(phase), "hard_rate": state["rate"]}
    left = state["kept"].tolist()
    asked = in_epochs(collect.seed, state["asked"], min(hard_prompts, len(left)), len(left))
    state |= {"asked": state["asked"] + len(asked)}
    tasks = [every[left[i]] for i in asked]
    return state, collect.episodes(tasks, hard_group, max_tokens=max_tokens, **sampling)


def _rates(
    collect: Collector, tasks: list[Any], answers: int, longest: int | None, sampling: dict[str, Any]
) -> Tensor:
    """How often the policy of now solves each task."""
    size, found = max(1, AT_ONCE // answers), []
    for first in range(0, len(tasks), size):
        rows = collect.episodes(tasks[first : first + size], answers, max_tokens=longest, **sampling)
        episodes = rows.by("episode")
        asked = Segments(episodes.first(rows["group"]))
        found.append(asked.mean(episodes.sum(rows["signal:success"]).double()))
    return torch.cat(found)


TINY = {
    "sample.prompts": 16,
    "sample.phases": (20, 20, 10, 10),
    "sample.sizes": (24, 16, 8),
    "sample.pool": 64,
    "sample.hard_prompts": 4,
    "sample.hard_group": 32,
    "sample.estimate": 8,
    "sample.solvable": True,
    "sample.window": None,
    "surrogate.high": 0.28,
    "reduce": "token_mean",
    "regularise.kl": "none",
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "run.steps": 60,
}
"""As many answers in every step. A small model never solves what is hardest, and would learn nothing from it."""


CLAIM = Ranks(
    "Among problems of mixed difficulty, a broad stage and then ever fewer of the hardest prompts, with four times as "
    "many answers to each, solve more of the hardest third of the levels after as many answers, estimates included, "
    "than GRPO throughout and than the hardest prompts from the second step on; of all levels hardly fewer than GRPO.",
    ("", "grpo", "hard only=drive:sample.phases=1,39,10,10"),
    "chain:frontier",
    "episodes=7680",
    metric="world:hardest",
    best=1.0,
    leads=True,
    keeps={"success": 0.05},
    also=("success", "area", "entropy", "truncated", "mean:degenerate_groups", "total_decisions"),
    shows=(Shows("mean:degenerate_groups", least=0.3),),
)


PUBLISHED: Published = {
    "arXiv 2511.06307, §3": {
        "sample.group": 8,
        "sample.phases": (32, 64, 32, 32),
        "sample.sizes": (72, 50, 25),
        "sample.pool": 175,
        "sample.hard_group": 64,
        "sample.window": 24576,
    },
}
"""Elsewhere its text has 80 answers a prompt in the second stage. How many prompts a step asks, and by how many answers
a prompt's success is estimated, is not stated; what is not of `sample` is GRPO's."""


@method("drive@1", paper=201, base="grpo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def drive() -> OnPolicy:
    """DRIVE (arXiv 2511.06307). GRPO with G = 8 on all prompts, then G = 64 on the n with the lowest p̂, n ever smaller.

    The first stage is broad, with a shorter window for answers, and is to keep entropy up; the second, Pre-GRPO, stays
    with a few dozen prompts, those that the policy of the moment solves least often, and asks for many answers to each:
    of a prompt with p = 0.02 a group of 8 differs with probability 0.15, one of 64 with 0.73. Three times the set is
    cut down to what is still hard.

    What is surprising: a stage on the hard prompts alone, without the broad one, or on all of their source without
    cutting down, is worse than none. Prompts that are never solved teach nothing however often they are asked
    (`sample.solvable` leaves them out), and what was hard before a phase may be easy after it: p̂ is estimated anew by
    answers that are not learned from. Look at success on other prompts than these few. The supervised stage before it,
    with its search for hard prompts among folds of the data, is not built: a run starts from any model.
    """
    return grpo().but(sample=broad_then_hardest())
