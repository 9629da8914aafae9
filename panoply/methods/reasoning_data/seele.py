"""SEELE: hints as long as it takes for half of the answers to be right, found while a prompt is being sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from panoply.batch import Batch, Values
from panoply.costs import Lengths, Tokens, own_episodes
from panoply.evidence.claims import Ranks, Shows
from panoply.evidence.races import find
from panoply.experience import Experience
from panoply.methods.base.grpo import TINY as GRPO_TINY
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, Part, part
from panoply.regimes import OnPolicy
from panoply.registry import Published, method
from panoply.slots.credit.groups import group
from panoply.slots.regularise.terms import kl
from panoply.slots.sample.groups import greedy_groups
from panoply.slots.sample.hints import DRAWN, SHARE, steps_of
from panoply.slots.task_memory import TaskMemory
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

# ------------------------------------------------------------------ accuracy as a function of the hint

STEEP, MIDDLE, FLOOR = (1.0, 50.0), (-0.5, 1.5), (0.0, 0.9)
"""Where k, −μ and b are looked for."""
GRID = (13, 41, 10)
"""How many values of each the first look has; each later one halves the distance between them."""
LOOKS = 12
PRIOR = (math.log(10.0), 0.5, 0.0)
"""Of ln k, −μ and b, and how much a distance to them costs: what decides where rounds are too few to say."""
PULL = 1e-7


def response(share: Tensor, steep: Tensor, middle: Tensor, floor: Tensor) -> Tensor:
    """f(p) = b + (1 − b)/(1 + e^{−k(p + μ)}), with −μ the middle: how often answers are right after a hint of p."""
    return floor + (1 - floor) * torch.sigmoid(steep * (share - middle))


def fitted(shares: Tensor, rates: Tensor) -> Tensor:
    """k, −μ and b of each row by least squares, from the shares that were tried and how often answers were right.

    Rounds with the same share count with their mean. A grid that is refined around its best point, all rows at once.
    """
    shares, rates = shares.double(), rates.double()
    same = (shares[:, :, None] == shares[:, None, :]).double()
    rates = (same @ rates[:, :, None])[..., 0] / same.sum(-1)
    low, high = ((math.log(STEEP[0]), MIDDLE[0], FLOOR[0]), (math.log(STEEP[1]), MIDDLE[1], FLOOR[1]))
    ends = torch.tensor([low, high], dtype=torch.float64)
    lines = [torch.linspace(a, z, n, dtype=torch.float64) for a, z, n in zip(low, high, GRID, strict=True)]
    points = torch.cartesian_prod(*lines)[None].expand(len(shares), -1, -1)
    width = (ends[1] - ends[0]) / (torch.tensor(GRID) - 1)
    steps = torch.cartesian_prod(*[torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0], dtype=torch.float64)] * 3)
    for look in range(LOOKS + 1):
        steep, middle, floor = points[:, :, 0, None].exp(), points[:, :, 1, None], points[:, :, 2, None]
        missed = ((response(shares[:, None], steep, middle, floor) - rates[:, None]) ** 2).sum(-1)
        missed = missed + PULL * ((points - torch.tensor(PRIOR, dtype=torch.float64)) ** 2).sum(-1)
        best = points[torch.arange(len(points)), missed.argmin(1)]
        points = (best[:, None] + steps * width / 2**look).clamp(ends[0], ends[1])
    return torch.stack([best[:, 0].exp(), best[:, 1], best[:, 2]], 1)


def share_for(target: float, curve: Tensor) -> Tensor:
    """f⁻¹(a): the hint after which a share a of answers is right; 0 where as many are by luck."""
    steep, middle, floor = curve.unbind(1)
    odds = (1 - floor) / (target - floor).clamp(min=1e-9) - 1
    return torch.where(floor >= target, 0.0, middle - odds.log() / steep)


def next_steps(tried: Tensor, rates: Tensor, steps: Tensor, target: float) -> Tensor:
    """How many steps to give in the next round, after rounds with `tried` steps of so many.

    Where all rounds were all wrong or all right, no curve can be fitted, and the way to the end is halved.
    """
    most = steps - 1
    wanted = share_for(target, fitted(tried / steps[:, None], rates)) * steps
    wanted = wanted.round().clamp(min=torch.zeros_like(wanted), max=most.double())
    wrong, right = (rates <= 0).all(1), (rates >= 1).all(1)
    more = (tried.max(1).values + most + 1).div(2, rounding_mode="floor").clamp(max=most)
    fewer = tried.min(1).values.div(2, rounding_mode="floor")
    return torch.where(wrong, more, torch.where(right, fewer, wanted.long()))


# ------------------------------------------------------------------ sampling in rounds


def _equation(held: Any) -> str:
    return (
        f"{held.prompts} of {held.pool} prompts, {held.rounds} rounds of {held.group} episodes, each after the hint "
        f"that a curve through the rounds before gives for {held.target:g} {held.name}"
    )


def _cost(held: Any, of: Lengths) -> Tokens:
    sampled, trained = own_episodes(held, of)
    return held.rounds * sampled, held.rounds * (trained + held.prompts * (of.prompt + of.context))


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.prompts > held.pool:
        return [("pool", f"a step asks for {held.prompts} prompts")]
    return greedy_groups(held, method)


@part(
    "sample",
    equation=_equation,
    needs=lambda held: frozenset({"world:verify", "world:hint", f"signal:{held.name}"}),
    bounds={**DRAWN, "rounds": "at least 1", "pool": "at least 1", "target": SHARE},
    gives={"stream:imitation"},
    impossible=_impossible,
    inert=lambda held, method, world: [("target", "one round chooses nothing")] if held.rounds == 1 else [],
    cost=_cost,
    state=dict,
)
def steered(
    state: dict[str, Any],
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    rounds: int = 4,
    temperature: float = 1.0,
    max_tokens: int | None = None,
    target: float = 0.5,
    pool: int = 256,
    name: str = "success",
) -> tuple[dict[str, Any], Experience]:
    """A group for each prompt, in rounds, whose hints are steered to where a share `target` of answers is right.

    All of a prompt's rounds are one group. The first begins with all steps but the last, or, when the prompt comes
    back, with what its last round had, which is remembered. Hints that were given are rows of the imitation stream as
    well, after the bare prompt. In metrics: `off_target_1`, … how far each round was from the target, and `hint_share`.

    group: episodes of each round
    target: the share of right answers that is aimed at
    pool: prompts that are asked again and again, all of them once before any comes back
    name: the signal that a right answer has
    """
    memory, world = TaskMemory.of(state), collect.world
    tasks = collect.numbered(collect.shuffled(prompts, pool))
    ids, steps = torch.tensor([task.id for task in tasks]), torch.tensor([steps_of(world, t) for t in tasks])
    known = memory.look(ids, given=-1)["given"]
    given = torch.where(known < 0, steps - 1, known)
    tried: list[Tensor] = []
    rates: list[Tensor] = []
    found: list[Experience] = []
    keys: Tensor | None = None
    for at in range(rounds):
        asked = [world.hint(t, n / s) for t, n, s in zip(tasks, given.tolist(), steps.tolist(), strict=True)]
        made = collect.episodes(asked, group, into=keys, temperature=temperature, max_tokens=max_tokens)
        groups, keys = made.by("group"), made.by("group").keys
        tried, rates = [*tried, given], [*rates, groups.sum(made[f"signal:{name}"].double()) / group]
        found.append(made)
        if at < rounds - 1:
            given = next_steps(torch.stack(tried, 1), torch.stack(rates, 1), steps, target)
    collect.notes = {
        "hint_share": float((given / steps).mean()),
        **{f"off_target_{i}": float((rate - target).abs().mean()) for i, rate in enumerate(rates, 1)},
    }
    last = dict(zip(ids.tolist(), given.tolist(), strict=True))
    memory = memory.write(torch.tensor(list(last)), given=torch.tensor(list(last.values())))
    return memory.state(), Experience.mix([*found, *_hints(collect, tasks, tried)])


def _hints(collect: Collector, tasks: Sequence[Any], tried: Sequence[Tensor]) -> list[Experience]:
    """What was given in each round, as answers to the bare prompts; nothing where nothing was."""
    size = collect.world.step_tokens
    shown = [(task, n) for given in tried for task, n in zip(tasks, given.tolist(), strict=True) if n > 0]
    answers = [collect.world.gold(task)[: n * size] for task, n in shown]
    return [collect.answers([task for task, _ in shown], answers)] if shown else []


# ------------------------------------------------------------------ imitation of hints


@part(
    "regularise",
    equation=lambda held: "−log π(hint|x)" if held.of == "logarithm" else "−π(hint|x)",
    unit="episode",
    stream="imitation",
    scores="policy",
    bounds={"weight": "at least 0"},
)
def hint_imitation(
    batch: Batch, *, weight: float | Part = 0.001, of: Literal["logarithm", "probability"] = "logarithm"
) -> Values:
    """How likely the policy would have said a hint itself, after the bare prompt; the mean over hints is raised.

    of: the logarithm; or the probability itself, as the paper prints it, whose gradient is the logarithm's times
        π(hint|x), so that a long hint that the policy would not say teaches nothing
    """
    said = batch.by("episode").sum(batch.now["logp"])
    return (-said if of == "logarithm" else -said.exp()), {"hint_p": said.detach().exp()}


RACE = find("wall")
CLAIM = Ranks(
    "Where no answer ever succeeds, hints that are steered to where half of the answers are right teach more problems "
    "without any hint in as many decisions than GRPO, which learns nothing, than hints that get shorter in a line, and "
    "than half of every answer.",
    (
        "",
        RACE.baseline,
        "shorter and shorter=grpo:sample=hinted,sample.share=0.875,sample.until=60",
        "half of every answer=grpo:sample=hinted",
    ),
    RACE.world,
    RACE.budget,
    leads=True,
    tune=RACE.tune,
    also=(
        "success",
        "off_target_1",
        "mean:off_target_1",
        "mean:off_target_4",
        "hint_share",
        "total_episodes",
    ),
    shows=(Shows("mean:degenerate_groups", least=0.95),),
    race="wall",
    **RACE.more,
)


TINY = {
    **GRPO_TINY,
    "sample.prompts": 8,
    "sample.group": 4,
    "sample.pool": 64,
    "regularise.kl": "none",
    "update.minibatches": 1,
}
PUBLISHED: Published = {
    "arXiv 2509.06923, experiments": {
        "sample.prompts": 256,
        "sample.group": 8,
        "sample.rounds": 4,
        "sample.target": 0.5,
        "sample.temperature": 1.0,
        "sample.pool": 22_000,
        "regularise.kl.weight": 0.001,
        "regularise.hint_imitation.weight": 0.001,
        "update.minibatches": 4,
    },
    "arXiv 2509.06923, method": {"credit.baseline": "mean", "credit.scale": "none"},
}
"""From notes on the full text; the authors' code could not be read. They fit with trust-region least squares."""


@method("seele@1", paper=215, base="grpo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def seele() -> OnPolicy:
    """SEELE (arXiv 2509.06923): of each prompt as much of the answer is given as makes half of the answers right.

    What a step can gain is bounded by E[a(1 − a)], which is largest where the share a of right answers is ½. A prompt's
    answers are sampled in four rounds; after each f(p) = b + (1 − b)/(1 + e^{−k(p + μ)}), a student's response to a
    hint of p, is fitted to all rounds so far, and the next hint is f⁻¹(½), in whole steps. Then A = r − mean over all
    rounds of the prompt, GRPO's bounded ratio on what was generated, and − γ·log π(hint|x) beside it: the only loss
    that hint tokens have, in the method or in any of its kind here.

    What is surprising: rounds with different hints are compared with one another, so that an answer after a long hint
    has an advantage for being easy. The last hint of a prompt is remembered for when it comes back.

    The paper prints the imitated term as a probability, which is as good as 0 for a long hint; the logarithm is taken
    here to be meant, and `regularise.hint_imitation.of=probability` is as printed. It is the mean over the hints that
    were given. Fits are made on a grid, which is quicker than a solver; where all rounds were all right or all wrong,
    no curve says anything, and the distance is halved instead.
    """
    return grpo().but(
        sample=steered(prompts=256, group=8, pool=22_000),
        credit=group(baseline="mean", scale="none"),
        regularise=(kl(weight=0.001, estimator="k3"), hint_imitation(weight=0.001)),
        update=adam(lr=1e-6, minibatches=4),
    )
