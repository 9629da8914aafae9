"""Data of several answers to each prompt, ranked."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from panoply.costs import Lengths, Tokens
from panoply.experience import DEMONSTRATION, Experience, Ragged, Segments, Table
from panoply.parts import Finding, part
from panoply.rollout.collector import in_epochs
from panoply.seeds import numpy_rng
from panoply.slots.sample.answers import answers_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task

Labels = Literal["signal", "chances", "answers"]


def ranked(experience: Experience, worth: Tensor) -> Experience:
    """The same episodes with the table `lists`: each group as a list by what its members are worth, the best first.

    worth: of each episode, in the order of `by("episode")`; it is the lists' column of that name. Among equals the one
    with the smaller episode number is first.
    """
    episodes = experience.by("episode")
    groups = Segments(episodes.first(experience["group"]))
    order = worth.argsort(descending=True, stable=True)
    order = order[groups.index[order].argsort(stable=True)]
    ends = torch.cat([groups.count.new_zeros(1), groups.count.cumsum(0)])
    members = {"episodes": Ragged(episodes.keys[order], ends), "worth": Ragged(worth[order], ends)}
    return experience.with_lists(Table(members))


def _needs(held: Any) -> frozenset[str]:
    asked = {"signal": set(), "chances": {"world:preference"}, "answers": {"world:prefer"}}[held.labels]
    of_teacher = {"world:teacher"} if held.whose == "teacher" else set()
    by_signal = {"world:verify", f"signal:{held.name}"} if held.labels == "signal" else set()
    return frozenset(asked | of_teacher | by_signal)


def _impossible(held: Any, method: Any) -> list[Finding]:
    if held.used > held.answers:
        return [("used", f"there are {held.answers} answers to a prompt (data.answers)")]
    if held.used == 1:
        return [("used", "an answer needs another one to be compared with")]
    return []


def _inert(held: Any, method: Any) -> list[Finding]:
    found = [("name", "annotators say what answers are worth")] if held.labels != "signal" else []
    if held.whose == "teacher":
        told = "the world's teacher answers, and not a policy"
        found += [(name, told) for name in ("refresh", "temperature", "top_k")]
    elif not held.prompts:
        found.append(("refresh", "without data.prompts the policy answers new prompts in every step"))
    if not held.prompts:
        found.append(("used", "without data.prompts each list is seen once: take fewer answers"))
    return found


def _equation(held: Any) -> str:
    whose = "the world's teacher" if held.whose == "teacher" else "the policy"
    known = f"of {held.prompts} " if held.prompts else ""
    again = f", who answers anew every {held.refresh} steps" if held.refresh else ""
    by = held.name if held.labels == "signal" else "how often annotators prefer each to the others"
    some = f", {held.used} of them a step" if held.used else ""
    return (
        f"{held.batch} {known}prompts a step: {held.answers} answers of {whose}{again}{some}, ranked by {by}"
    )


def _cost(held: Any, of: Lengths) -> Tokens:
    answers = held.used or held.answers
    return 0, held.batch * (of.prompt + answers * of.context)


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
        "used": "at least 0",
        "temperature": "above 0",
        "top_k": "at least 0",
    },
)
def lists(
    state: dict[str, Any],
    collect: Collector,
    *,
    batch: int = 16,
    answers: int = 8,
    prompts: int = 0,
    whose: Literal["teacher", "policy"] = "teacher",
    refresh: int = 0,
    used: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    labels: Labels = "signal",
    name: str = "success",
) -> tuple[dict[str, Any], Experience]:
    """Several answers to each prompt as a group, with all their signals, and ranked by what they are worth (`lists`).

    answers      how many there are to a prompt
    prompts      how many there are, gone through in a new order again and again; 0 makes new ones for ever
    whose        who answers: the world's teacher, or the policy before its first step (without `prompts`, as it is in
                 every step). Its rows have the `logp` they were drawn with, at that temperature and with that cut
    refresh      after so many steps the policy, as it is then, answers all prompts anew; 0 means never
    used         how many of a prompt's answers a step has, drawn by lot each time; 0 means all
    temperature, top_k   of the policy's answers
    labels       what an answer is worth: a `signal`; the mean of the `chances` with which annotators prefer it to each
                 answer of its prompt, ½ to itself; or that of the `answers` of one annotator to each such question.
                 `questions` in a step's metrics counts what annotators were asked
    name         the signal
    """
    how = {"temperature": temperature, "top_k": top_k}
    if not prompts:
        tasks = collect.tasks(batch)
        made = _answered(collect, tasks, answers, whose, how)
        return state, ranked(made, _worth(collect, tasks, made, labels, name))
    if not state or (refresh and state["steps"] >= refresh):
        state = _set(collect, state, prompts, answers, whose, how, labels, name)
    rows = in_epochs(collect.seed, state["next"], batch, prompts)
    of = [row * answers + _some(collect.seed, state["next"] + i, answers, used) for i, row in enumerate(rows)]
    said, chosen = Ragged(state["tokens"], state["offsets"]), torch.cat(of)
    made = _told(
        collect,
        collect.numbered(state["first"] + row for row in rows),
        [said.take(several).tolist() for several in of],
    )
    if "logp" in state:
        made = made.with_columns(logp=Ragged(state["logp"], state["offsets"]).take(chosen).values)
    state = {**state, "next": state["next"] + batch, "steps": state["steps"] + 1}
    return state, ranked(made, state["worth"][chosen])


def _some(seed: int, visit: int, answers: int, used: int) -> Tensor:
    """Which of a prompt's answers are used on a visit, in their order."""
    if not used:
        return torch.arange(answers)
    drawn = numpy_rng("used", seed, visit).choice(answers, used, replace=False)
    return torch.from_numpy(drawn).sort().values


def _answered(
    collect: Collector, tasks: Sequence[Task], answers: int, whose: str, how: dict[str, Any]
) -> Experience:
    """New answers, which belong to the stream of given data whoever gave them."""
    if whose == "policy":
        made = collect.episodes(tasks, answers, **how)
        return made.with_columns(source=torch.full((len(made),), DEMONSTRATION))
    dice = [numpy_rng("lists", collect.seed, collect.state["episodes"], task.id) for task in tasks]
    every = zip(tasks, dice, strict=True)
    return _told(
        collect, tasks, [[collect.world.demonstrate(t, rng) for _ in range(answers)] for t, rng in every]
    )


def _told(collect: Collector, tasks: Sequence[Task], answers: Sequence[list[list[int]]]) -> Experience:
    """A group of given answers to each task; a task that comes twice has two groups."""
    first = collect.state["groups"]
    collect.state["groups"] += len(tasks)
    place = [i for i, several in enumerate(answers) for _ in several]
    said = [answer for several in answers for answer in several]
    groups = first + torch.tensor(place)
    return collect.answers([tasks[i] for i in place], said, into=groups, source=DEMONSTRATION)


def _worth(collect: Collector, tasks: Sequence[Task], made: Experience, labels: Labels, name: str) -> Tensor:
    """What each episode is worth, in the order of `by("episode")`: of the first task's answers, of the second's, …"""
    if labels == "signal":
        return made.by("episode").sum(made[f"signal:{name}"].float())
    said, keys = answers_of(made), made.by("episode").keys.tolist()
    size, world = len(said) // len(tasks), collect.world
    won = torch.full((len(said),), 0.5)
    for first, task in zip(range(0, len(said), size), tasks, strict=True):
        for a, b in itertools.combinations(range(first, first + size), 2):
            if labels == "chances":
                chance = world.preference(task, said[a], said[b])
            else:
                rng = numpy_rng("labels", collect.seed, keys[a], keys[b])
                chance = float(world.prefer(task, said[a], said[b], rng))
            won[a] += chance
            won[b] += 1 - chance
    asked = len(tasks) * size * (size - 1) // 2
    collect.notes = {**collect.notes, "questions": float(asked)}
    return won / size


def _set(
    collect: Collector,
    state: dict[str, Any],
    prompts: int,
    answers: int,
    whose: str,
    how: dict[str, Any],
    labels: Labels,
    name: str,
) -> dict[str, Any]:
    """A data set, as it is remembered: all answers to the first prompt, to the second, …, and what each is worth."""
    first = state.get("first", collect.state["tasks"])
    tasks = collect.numbered(range(first, first + prompts)) if state else collect.tasks(prompts)
    made = _answered(collect, tasks, answers, whose, how)
    episodes = made.by("episode")
    said: dict[str, Tensor] = {
        "tokens": made["action"],
        "offsets": torch.cat([episodes.count.new_zeros(1), episodes.count.cumsum(0)]),
        "worth": _worth(collect, tasks, made, labels, name),
    }
    if "logp" in made:
        said["logp"] = made["logp"]
    return {"next": state.get("next", 0), "steps": 0, "first": first, **said}
