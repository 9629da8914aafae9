"""Data of several answers to each prompt, ranked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens
from panoply.experience import DEMONSTRATION, Experience, Ragged, Segments, Table
from panoply.parts import Finding, part
from panoply.rollout.collector import in_epochs
from panoply.seeds import numpy_rng

if TYPE_CHECKING:
    from collections.abc import Sequence

    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task


def ranked(experience: Experience, name: str = "success") -> Experience:
    """The same episodes with the table `lists`: each group as a list by what it earned of a signal, the best first.

    Column `worth` is what each member earned. Among equals the one with the smaller episode number is first.
    """
    episodes = experience.by("episode")
    worth = episodes.sum(experience[f"signal:{name}"].float())
    groups = Segments(episodes.first(experience["group"]))
    order = worth.argsort(descending=True, stable=True)
    order = order[groups.index[order].argsort(stable=True)]
    ends = torch.cat([groups.count.new_zeros(1), groups.count.cumsum(0)])
    members = {"episodes": Ragged(episodes.keys[order], ends), "worth": Ragged(worth[order], ends)}
    return experience.with_lists(Table(members))


def _needs(held: Any) -> frozenset[str]:
    of_teacher = {"world:teacher"} if held.whose == "teacher" else set()
    return frozenset({"world:verify", f"signal:{held.name}"} | of_teacher)


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.whose == "start" and not held.prompts:
        return [
            ("whose", "the starting policy answers a number of prompts once; say how many with data.prompts")
        ]
    return []


def _inert(held: Any, method: Any) -> list[Finding]:
    if held.whose == "start":
        return []
    return [(name, "the world's teacher answers, and not a policy") for name in ("refresh", "temperature")]


def _equation(held: Any) -> str:
    whose = "the world's teacher" if held.whose == "teacher" else "the starting policy"
    known = f"of {held.prompts} " if held.prompts else ""
    again = f", who answers anew every {held.refresh} steps" if held.refresh else ""
    return (
        f"{held.batch} {known}prompts a step: {held.answers} answers of {whose}{again}, ranked by {held.name}"
    )


def _cost(held: Any, of: Lengths) -> Tokens:
    return 0, held.batch * (of.prompt + held.answers * of.context)


@part(
    "data",
    equation=_equation,
    needs=_needs,
    state=dict,
    impossible=_impossible,
    inert=_inert,
    gives={"lists"},
    cost=_cost,
    bounds={
        "batch": "at least 1",
        "answers": "at least 2",
        "prompts": "at least 0",
        "refresh": "at least 0",
        "temperature": "above 0",
    },
)
def lists(
    state: dict[str, Any],
    collect: Collector,
    *,
    batch: int = 16,
    answers: int = 8,
    prompts: int = 0,
    whose: Literal["teacher", "start"] = "teacher",
    refresh: int = 0,
    temperature: float = 1.0,
    name: str = "success",
) -> tuple[dict[str, Any], Experience]:
    """Several answers to each prompt as a group, with all their signals, and ranked by one of them (table `lists`).

    answers      how many there are to a prompt
    prompts      how many there are, gone through in a new order again and again; 0 makes new ones for ever
    whose        who answers: the world's teacher, or the policy before its first step, whose rows have their `logp`
    refresh      after so many steps the policy, as it is then, answers all prompts anew; 0 means never
    temperature  of the policy's answers
    name         the signal they are ranked by
    """
    if not prompts:
        tasks = collect.tasks(batch)
        return state, ranked(_told(collect, tasks, [_taught(collect, task, answers) for task in tasks]), name)
    if not state or (refresh and state["steps"] >= refresh):
        state = _set(collect, state, prompts, answers, whose, temperature)
    rows = in_epochs(collect.seed, state["next"], batch, prompts)
    of = [(state["prompt"] == row).nonzero().flatten() for row in rows]
    said = Ragged(state["tokens"], state["offsets"])
    tasks = collect.numbered(state["first"] + row for row in rows)
    made = _told(collect, tasks, [said.take(chosen).tolist() for chosen in of])
    if "logp" in state:
        made = made.with_columns(logp=Ragged(state["logp"], state["offsets"]).take(torch.cat(of)).values)
        if temperature != 1:
            made = made.with_columns(temperature=torch.full((len(made),), temperature))
    return {**state, "next": state["next"] + batch, "steps": state["steps"] + 1}, ranked(made, name)


def _taught(collect: Collector, task: Task, answers: int) -> list[list[int]]:
    """Answers of the world's teacher, other ones each time a task is asked."""
    dice = numpy_rng("lists", collect.seed, collect.state["episodes"], task.id)
    return [collect.world.demonstrate(task, dice) for _ in range(answers)]


def _told(collect: Collector, tasks: Sequence[Task], answers: Sequence[list[list[int]]]) -> Experience:
    """A group of given answers to each task; a task that comes twice has two groups."""
    first = collect.state["groups"]
    collect.state["groups"] += len(tasks)
    place = [i for i, several in enumerate(answers) for _ in several]
    said = [answer for several in answers for answer in several]
    groups = first + torch.tensor(place)
    return collect.answers([tasks[i] for i in place], said, into=groups, source=DEMONSTRATION)


def _set(
    collect: Collector, state: dict[str, Any], prompts: int, answers: int, whose: str, temperature: float
) -> dict[str, Any]:
    """A data set, as it is remembered: which prompts, and all answers to them one after another."""
    first = state.get("first", collect.state["tasks"])
    tasks = collect.numbered(range(first, first + prompts)) if state else collect.tasks(prompts)
    begun = collect.state["episodes"]
    if whose == "start":
        made = collect.episodes(tasks, answers, temperature=temperature)
    else:
        made = _told(collect, tasks, [_taught(collect, task, answers) for task in tasks])
    episodes = made.by("episode")
    said: dict[str, Tensor] = {
        "prompt": (episodes.keys - begun) // answers,
        "tokens": made["action"],
        "offsets": torch.cat([episodes.count.new_zeros(1), episodes.count.cumsum(0)]),
    }
    if "logp" in made:
        said["logp"] = made["logp"]
    return {"next": state.get("next", 0), "steps": 0, "first": first, **said}
