"""Groups in which some of the answers are teachers'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens
from panoply.experience import Experience
from panoply.parts import Finding, part
from panoply.seeds import torch_rng
from panoply.slots.sample.groups import LIMITS
from panoply.slots.sample.repair import episodes_of, failed, replaced, tasks_of

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task

When = Literal["always", "failed"]
Choose = Literal["first", "random", "understood"]
CHOSEN = {"first": "the first", "random": "any", "understood": "those best understood"}


def _equation(held: Any) -> str:
    own = held.group - held.answers if held.when == "always" else held.group
    theirs = f"{held.answers} of teachers' ({CHOSEN[held.choose]})"
    rest = f" and {theirs}" if held.when == "always" else f"; where all failed, {theirs} for as many of them"
    return f"{held.prompts} prompts × {own} episodes at temperature {held.temperature:g}{rest}"


def _cost(held: Any, of: Lengths) -> Tokens:
    """Teachers' answers are trained on, and not sampled."""
    own = held.group - held.answers if held.when == "always" else held.group
    return held.prompts * own * of.answer, held.prompts * (of.prompt + held.group * of.context)


def _impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    found = []
    if held.answers >= held.group:
        found.append(("answers", f"a group of {held.group} has to keep an episode of the policy's own"))
    if held.choose == "understood" and "teachers" in world.access and "conclusion" not in world.access:
        found.append(("choose", f"{world.name} has no final answer by which understanding could be measured"))
    return found


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    if "teachers" in world.access:
        return []
    alone = f"{world.name} has one teacher"
    return [("choose", alone)] + ([("answers", alone)] if held.when == "failed" else [])


@part(
    "sample",
    equation=_equation,
    needs={"world:verify", "world:reference"},
    gives={"stream:imitation"},
    bounds={**LIMITS, "answers": "at least 1"},
    impossible=_impossible,
    inert=_inert,
    cost=_cost,
)
def taught(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    answers: int = 1,
    when: When = "always",
    choose: Choose = "first",
    temperature: float = 1.0,
) -> Experience:
    """Groups of episodes, of which some are right answers of the world's teachers (`world.solutions`).

    A teacher's answer that the world finds wrong is left out. Numbers for the metrics: `taught`, the share of groups
    that a teacher was in, and `understood`, the mean score of all their answers where they are chosen by it.

    group     episodes of a group, the teachers' among them
    answers   how many are teachers', or as many as there are
    when      `always`, beside the policy's own; `failed`: in the place of wrong ones, drawn at random, and only where
              none of the group succeeded
    choose    which teachers, where there are several: the `first`, `random` ones, or those whose reasoning the policy
              has `understood` best, by the mean probability that it then gives to the tokens of the final answer
    """
    tasks = collect.tasks(prompts)
    own = group - answers if when == "always" else group
    found = collect.episodes(tasks, own, temperature=temperature)
    groups = found.by("group").keys if when == "always" else failed(found)
    asked = [(task, verified(collect.world, task)) for task in tasks_of(found, groups, tasks)]
    order, notes = _order(collect, asked, choose)
    given = [
        (key, task, right[i])
        for key, (task, right), best in zip(groups.tolist(), asked, order, strict=True)
        for i in best[:answers]
    ]
    collect.notes = {**collect.notes, "taught": len({key for key, *_ in given}) / len(tasks), **notes}
    if not given:
        return found
    into = torch.tensor([key for key, *_ in given])
    theirs = collect.answers([task for _, task, _ in given], [answer for *_, answer in given], into=into)
    out = into[:0] if when == "always" else _some(collect, found, into)
    return replaced(found, out, theirs)


def verified(world: Any, task: Task) -> list[list[int]]:
    """The teachers' answers that the world finds right."""
    every = world.solutions(task)
    graded = world.grade_all([task] * len(every), every)
    return [answer for answer, g in zip(every, graded, strict=True) if g is not None and g["success"]]


def _order(
    collect: Collector, asked: Sequence[tuple[Task, list[list[int]]]], choose: Choose
) -> tuple[list[list[int]], dict[str, float]]:
    """Of each task the numbers of its answers, the one to take first before the others."""
    if choose == "first" or not any(len(right) > 1 for _, right in asked):
        return [list(range(len(right))) for _, right in asked], {}
    if choose == "random":
        named = (collect.seed, collect.version)
        scores = [torch.rand(len(a), generator=torch_rng("teachers", *named, t.id)) for t, a in asked]
    else:
        scores = understood(collect, asked)
    order = [score.argsort(descending=True, stable=True).tolist() for score in scores]
    return order, {"understood": float(torch.cat(scores).mean())} if choose == "understood" else {}


def understood(collect: Collector, asked: Sequence[tuple[Task, list[list[int]]]]) -> list[Tensor]:
    """Of each task's answers, the mean probability of the final answer's tokens after the reasoning that leads there.

    Of the final answer alone: how likely the policy finds the reasoning does not count.
    """
    from panoply.rollout.answer_likelihood import probabilities

    questions = []
    for task, answers in asked:
        bridge, conclusion = collect.world.conclusion(task)
        end = [*bridge, *conclusion]
        for answer in answers:
            reasoning = answer[: -len(end)] if answer[-len(end) :] == end else answer
            questions.append(((*task.prompt, *reasoning, *bridge), tuple(conclusion)))
    return list(torch.split(probabilities(collect.policy, questions), [len(answers) for _, answers in asked]))


def _some(collect: Collector, found: Experience, into: Tensor) -> Tensor:
    """As many episodes of each group, drawn at random, as answers go into it."""
    out = []
    for key, n in zip(*torch.unique(into, return_counts=True), strict=True):
        members = episodes_of(found, key)
        rng = torch_rng("replaced", collect.seed, int(key))
        out.append(members[torch.randperm(len(members), generator=rng)[: int(n)]])
    return torch.cat(out)
