"""GHPO: groups in which nobody succeeds are asked again with the beginning of the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from panoply.costs import Lengths, Tokens, own_episodes
from panoply.evidence.claims import Ranks, Shows
from panoply.evidence.races import find
from panoply.experience import Experience
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.reward.signals import blend
from panoply.slots.sample.groups import greedy_groups
from panoply.slots.sample.hints import DRAWN, SHARE, further, shown
from panoply.slots.sample.repair import episodes_of, failed, replaced, tasks_of
from panoply.slots.schedule.schedules import cosine
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


def _equation(held: Any) -> str:
    levels = " → ".join(f"{level:g}" for level in held.levels)
    return (
        f"{held.prompts} prompts × {held.group} episodes; a group without {held.name} is asked again with ω of the "
        f"answer given, ω = {levels}"
    )


def _cost(held: Any, of: Lengths) -> Tokens:
    sampled, trained = own_episodes(held, of)
    return sampled * (1 + len(held.levels)), trained


def _impossible(held: Any, method: Any) -> list[Finding]:
    rising = all(one < two for one, two in zip(held.levels, held.levels[1:], strict=False))
    if not held.levels or not rising or held.levels[0] == 0:
        return [("levels", "hints are shares of the answer above 0, each larger than the one before")]
    return greedy_groups(held, method)


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    if held.cold == 0:
        return [("first", "there is no cold start (cold=0)")]
    late = f"hints begin when it is over (start={held.start})"
    return [("cold", late), ("first", late)] if held.start >= held.cold else []


@part(
    "sample",
    equation=_equation,
    needs=lambda held: frozenset({"world:verify", "world:hint", f"signal:{held.name}"}),
    bounds={**DRAWN, "levels": SHARE, "first": SHARE, "cold": "at least 0", "start": "at least 0"},
    impossible=_impossible,
    inert=_inert,
    cost=_cost,
)
def rescued(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    max_tokens: int | None = None,
    levels: tuple[float, ...] = (0.25, 0.5, 0.75),
    cold: int = 20,
    first: float = 0.5,
    start: int = 0,
    name: str = "success",
) -> Experience:
    """Groups, and in the place of one that fails as a whole another, after a hint that grows until somebody succeeds.

    All of a group's episodes stand after the same prompt, so that they are compared with their likes. A hint is of
    whole steps; a level that gives no more of them than the last one is passed over. A group that fails with the
    largest hint, too, stays as it is then. The metrics `hinted` and `hint_share` say how many groups end with a hint
    and how much of the answer those show, `unsolved` how many fail all the same.

    levels: shares of the reference answer, one after another
    cold: steps in the beginning that have one level instead, `first`
    start: steps in the beginning that give no hints at all, as the authors' code has it
    name: the signal that nobody has in a group that fails
    """
    tasks = collect.tasks(prompts)
    drawn: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    found = collect.episodes(tasks, group, **drawn)
    ladder = () if collect.version < start else (first,) if collect.version < cold else levels
    given: dict[int, float] = {}
    now = dict(
        zip(found.by("group").keys.tolist(), tasks_of(found, found.by("group").keys, tasks), strict=True)
    )
    for level in ladder:
        hard = failed(found, name).tolist()
        asked = further(collect.world, [now[key] for key in hard], level)
        again = {key: task for key, task in zip(hard, asked, strict=True) if task is not None}
        if again:
            keys = torch.tensor(list(again))
            more = collect.episodes(list(again.values()), group, into=keys, **drawn)
            found, now = replaced(found, episodes_of(found, keys), more), now | again
            given |= {key: shown(collect.world, task) for key, task in again.items()}
    collect.notes = {
        "hinted": len(given) / prompts,
        "hint_share": sum(given.values()) / max(1, len(given)),
        "unsolved": len(failed(found, name)) / prompts,
    }
    return found


RACE = find("wall")
CLAIM = Ranks(
    "Where no answer ever succeeds, groups asked again with a growing part of the answer teach problems without any "
    "hint: after as many decisions GHPO solves more of them than GRPO, which learns nothing, and more than GRPO with "
    "half of the answer given to every problem.",
    ("", RACE.baseline, "half of every answer=grpo:sample=hinted"),
    RACE.world,
    RACE.budget,
    leads=True,
    tune=RACE.tune,
    also=("success", "hinted", "hint_share", "unsolved", "degenerate_groups", "total_episodes"),
    shows=(Shows("mean:degenerate_groups", least=0.95),),
    race="wall",
    **RACE.more,
)


TINY = {
    "update.schedule": "constant",
    **GRPO_TINY,
    "sample.prompts": 16,
    "sample.cold": 5,
    "reward": "signal",
}
"""GRPO's, so that they can be compared. Answers of small worlds end by themselves: there is no format to be learned."""
CONFIG = "hkgc-1/GHPO, recipes/Qwen2.5-Math-7B/ghpo/config_ghpo.yaml"
PUBLISHED: Published = {
    "arXiv 2507.10628, by notes on it": {
        "sample.levels": (0.25, 0.5, 0.75),
        "sample.cold": 20,
        "sample.first": 0.5,
        "reduce": "sequence_mean",
    },
    f"{CONFIG}, with the seven processes of its README": {"sample.prompts": 196},
    CONFIG: {
        "sample.group": 8,
        "sample.temperature": 1.0,
        "sample.start": 0,
        "reward.weights": (1.0, 0.5),
        "regularise.kl.weight": None,
        "update.lr": 1e-6,
        "update.schedule": "cosine",
        "update.schedule.warmup": 0.1,
    },
    "hkgc-1/GHPO, src/ghpo/ghpo_trainer.py and ghpo_config.py": {
        "credit.epsilon": 1e-4,
        "surrogate.low": 0.2,
        "surrogate.high": 0.2,
        "update.epochs": 1,
        "update.minibatches": 1,
    },
}
"""How many steps the cold start has is retold of the paper."""


@method("ghpo@1", paper=115, base="grpo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def ghpo() -> OnPolicy:
    """GHPO (arXiv 2507.10628): if all answers to a prompt are wrong, ask again with the first ω of the solution given.

    q* = q where somebody succeeds, else q ⊕ h[: ω·|h|] with ω = ¼, ½, ¾ until somebody does; the rest is GRPO with
    ρ = π(o|q*)/π_old(o|q*). The hint stands in the prompt of both policies, so the ratio starts at 1 and hint tokens
    have no loss. A group that differs in nothing has no gradient: the hint is not a lesson to imitate but what makes
    the group differ. The whole group is redone, so that answers with a hint are never compared with answers without.

    What is surprising: nothing takes hints away again. They are given only where a group fails without, and so fade by
    themselves as the policy gets better; the mean `hint_share` tells. A step may sample four times what GRPO samples:
    where every step of an answer needs the same skill, as in `chain`, half of the answer given to every problem teaches
    that skill in fewer decisions, and is ahead of it at as many.

    The authors' code cuts hints by characters, here they are whole steps of the world's reference answer. It averages
    over tokens (`reduce=token_mean`) where the paper averages over answers first, and has no cold start (`sample.cold`)
    but may begin without hints (`sample.start`). The reward is success and half for the format, which is `ended` here.
    """
    return grpo().but(
        sample=rescued(prompts=196, group=8),
        reward=blend(names=("success", "ended"), weights=(1.0, 0.5)),
        regularise=(),
        update=adam(lr=1e-6, schedule=cosine(warmup=0.1)),
    )
