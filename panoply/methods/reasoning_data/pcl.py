"""PCL: a value of the prompt alone picks what is asked, the prompts whose success is nearest to a coin's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from panoply.evidence.claims import Learns, Shows
from panoply.experience import OWN, Experience
from panoply.methods.base.grpo import grpo
from panoply.parts import Finding, Part, part
from panoply.regimes import Fit, OnPolicy
from panoply.registry import Published, method
from panoply.seeds import torch_rng
from panoply.slots.credit.groups import episode_returns, group
from panoply.slots.loss.values import squared_value
from panoply.slots.model.model import Model
from panoply.slots.model.prompts import after_prompts, asked_about
from panoply.slots.reduce.averages import token_mean
from panoply.slots.sample.groups import LIMITS, greedy_cuts, greedy_groups
from panoply.slots.surrogate.ratios import ratio
from panoply.slots.update.optimisers import adam

if TYPE_CHECKING:
    from panoply.loops.seat import Seat
    from panoply.policies.text import TextPolicy
    from panoply.policies.value import ValueModel
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task

_UPDATE = adam(lr=1e-5)
# ------------------------------------------------------------------ the value of a prompt


@torch.no_grad()
def foretold(model: ValueModel, tasks: Sequence[Task]) -> Tensor:
    """V(x) of each task, read where its answer would begin."""
    said: Tensor = model.head(model.trunk.prompt_states(tasks))[:, 0]
    return said.float().cpu()


def prompts_and_means(experience: Experience) -> Experience:
    """What V learns from: a row for each prompt that was asked, without any answer, and as `target` the mean return."""
    own = experience.take(experience["source"] == OWN) if "source" in experience else experience
    prompts, tasks, _ = asked_about(own)
    returns, groups = episode_returns(own)
    return after_prompts(prompts, tasks).with_columns(target=groups.mean(returns.float()))


@part(
    "model",
    equation="V(x), descending (V(x) − mean return of x's group)²",
    needs={"world:text"},
    gives={"model:prompt_value"},
    cost=lambda held: held.update,
)
def prompt_value(seat: Seat, *, update: Part = _UPDATE) -> Model:
    """How much a prompt will earn, by a model as large as the policy that has read the prompt and no answer.

    It begins as the policy began, with a head of zeros, and learns from what was asked in every step, with no rollouts
    of its own. It says what it has learned up to the step before.
    """
    from panoply.policies.value import ValueModel

    model = ValueModel.of(cast("TextPolicy", seat.open(seat.options.model)))
    return Model(
        model, ask=foretold, fit=Fit((squared_value(),), token_mean(), update), among=prompts_and_means
    )


# ------------------------------------------------------------------ what is asked


def nearest_to(value: Tensor, target: float, dice: torch.Generator) -> list[int]:
    """Places in the order of |value − target|; equals in an order by chance."""
    order = torch.randperm(len(value), generator=dice)
    found: list[int] = order[(value[order] - target).abs().argsort(stable=True)].tolist()
    return found


def repeats_last(order: Sequence[int], ids: Sequence[int]) -> list[int]:
    """The same places, those of a task that stands before already at the end."""
    first = {ids[i]: i for i in reversed(order)}
    return sorted(order, key=lambda i: first[ids[i]] != i)


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    found = greedy_cuts(held, method, world)
    if held.among == 1:
        found += [(name, "among is 1, so that all that is drawn is asked") for name in ("target", "uniform")]
    return found


@part(
    "sample",
    equation=lambda held: (
        f"of {held.among * held.prompts} prompts the {held.prompts} with the least |V(x) − {held.target:g}|, × "
        f"{held.group} episodes at temperature {held.temperature:g}"
    ),
    needs={"model:prompt_value"},
    inert=_inert,
    impossible=greedy_groups,
    bounds={**LIMITS, "among": "at least 1", "target": "any number", "uniform": "from 0 up to 1"},
)
def nearest(
    collect: Collector,
    *,
    prompts: int = 512,
    group: int = 16,
    among: int = 4,
    target: float = 0.5,
    uniform: float = 0.0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    max_tokens: int | None = None,
) -> Experience:
    """Of several times as many prompts those whose value is nearest to a target. Only they are answered.

    Where worlds have few prompts, one that is drawn twice is asked twice only when there are no others. Metrics:
    `asked_value` and `drawn_value`, what is expected of those that are asked and of all; `asked_level`, their level.

    among     how many times as many are drawn
    target    the mean reward that is looked for
    uniform   the share of those asked that chance chooses and not V, which so learns of others too
    """
    drawn = collect.tasks(among * prompts)
    value = collect.models["prompt_value"](drawn)
    dice = torch_rng("nearest", collect.seed, collect.state["groups"])
    order = repeats_last(nearest_to(value, target, dice), [task.id for task in drawn])
    by_chance = int(uniform * prompts)
    chosen, rest = order[: prompts - by_chance], order[prompts - by_chance :]
    chosen += [rest[i] for i in torch.randperm(len(rest), generator=dice)[:by_chance].tolist()]
    asked = [drawn[i] for i in chosen]
    collect.notes = {
        "groups_asked": len(asked),
        "asked_value": float(value[chosen].mean()),
        "drawn_value": float(value.mean()),
        "asked_level": sum(task.level for task in asked) / len(asked),
    }
    return collect.episodes(
        asked,
        group,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_tokens=max_tokens,
    )


TINY = {
    "sample.prompts": 16,
    "sample.group": 8,
    "sample.among": 8,
    "sample.uniform": 0.25,
    "models.prompt_value.update.lr": 3e-4,
    "models.prompt_value.update.epochs": 4,
    "update.lr": 3e-4,
    "update.beta2": 0.95,
    "update.schedule.warmup": 10,
    "run.steps": 150,
}
"""Of sixteen prompts a step V learns little, so that it sees them four times, and it forgets what it does not ask: a
quarter is asked by chance. Without, one of two runs asked nothing but the easiest prompts for eighty steps."""


CLAIM = Learns(
    "Where most prompts are all right or all wrong, asking those of eight times as many whose value is nearest to a "
    "half learns more from as many answers than GRPO, which asks whatever comes.",
    race="skew",
    also=("success", "mean:degenerate_groups", "mean:asked_level", "total_decisions"),
    shows=(Shows("mean:degenerate_groups", least=0.4),),
)


PUBLISHED: Published = {
    "arXiv 2510.01135, §4": {
        "sample.prompts": 512,
        "sample.group": 16,
        "sample.among": 4,
        "sample.target": 0.5,
        "credit.baseline": "mean",
        "credit.scale": "none",
        "surrogate": "ratio",
        "reduce": "sequence_mean",
        "regularise.kl.weight": None,
        "update.epochs": 1,
        "update.minibatches": 1,
    },
}
"""No code is released. How the value's head looks and at which rates both learn is not known here: a linear head on the
last state of the prompt, and rates of the base, are chosen."""


@method("pcl@1", paper=17, base="grpo", presets={"tiny": TINY}, claim=CLAIM, published=PUBLISHED)
def pcl() -> OnPolicy:
    """Prompt Curriculum Learning (arXiv 2510.01135). GRPO on the m of k·m prompts with the least |V(x) − ½|.

    A group of n answers that are each right with probability p differs with probability 1 − pⁿ − (1 − p)ⁿ, and
    E[A²] = p(1 − p) is largest at ½. A model V of the prompt alone foretells p: one short forward pass takes the place
    of the rollouts by which dynamic sampling finds such prompts out. It learns from the same answers as the policy, so
    that it follows it a step behind, and harder prompts are asked as the policy improves (`asked_level`).

    Nothing is divided by a deviation, and with one update a batch the ratio is 1. What is surprising: V learns only of
    prompts that it chose itself. The paper reports that this does no harm, since what is overrated is asked and found
    out. What is underrated is not, so that small batches may lock in: `sample.uniform` asks some prompts by chance. At
    first V is 0 everywhere, and chance decides. Text alone: what is read is a prompt.
    """
    return grpo().but(
        sample=nearest(),
        models=(prompt_value(),),
        credit=group(baseline="mean", scale="none"),
        surrogate=ratio(),
        regularise=(),
    )
