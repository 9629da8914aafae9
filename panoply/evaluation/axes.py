"""Three axes of reasoning: what a policy makes of a plan, of knowledge, of a problem taken apart (arXiv 2506.04723).

Δ_plan = success with the plan before the problem − success without; Δ_knowledge the same with facts. An aid also makes
a prompt longer and unusual, so each is compared with its own tokens in a random order, which tell nothing. A problem
is taken apart into the steps of its reference answer, each asked after all steps before it were given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from statistics import fmean

from panoply.errors import PanoplyError
from panoply.seeds import numpy_rng
from panoply.slots.sample.hints import steps_of
from panoply.worlds.world import Task, TextWorld

Ask = Callable[[Sequence[Task]], Sequence[Sequence[int]]]
"""What a policy answers to tasks, one answer each."""
AIDS = ("plan", "knowledge")


def check(world: object) -> None:
    """Refuse a world that cannot be asked."""
    missing = sorted({"hint", *AIDS} - getattr(world, "access", frozenset()))
    if missing:
        name = getattr(world, "name", "this world")
        raise PanoplyError(
            f"Reasoning is taken apart in a world with hints, plans and knowledge, such as chain; {name} has no "
            f"{' and no '.join(missing)}."
        )


def shuffled(world: TextWorld, task: Task, kind: str) -> Task:
    """The task after the tokens of an aid in a random order: as long, and of no use."""
    aided = world.aided(task, kind)
    size = len(aided.prompt) - len(task.prompt)
    order = numpy_rng("shuffled aid", kind, task.id).permutation(size)
    return dataclasses.replace(task, prompt=(*(aided.prompt[i] for i in order), *task.prompt))


def success(world: TextWorld, ask: Ask, tasks: Sequence[Task]) -> list[float]:
    """Of each task whether its answer succeeds."""
    graded = (world.grade(task, answer) for task, answer in zip(tasks, ask(tasks), strict=True))
    return [float(signals["success"] or 0.0) for signals in graded]  # type: ignore[arg-type]


def parts_solved(world: TextWorld, ask: Ask, tasks: Sequence[Task]) -> list[list[bool]]:
    """Of each task which of its steps a policy takes, each asked for after the reference's steps before it."""
    size, number = world.step_tokens, [steps_of(world, task) for task in tasks]
    asked = [
        (world.hint(task, i / n), world.gold(task)[i * size : (i + 1) * size])
        for task, n in zip(tasks, number, strict=True)
        for i in range(n)
    ]
    answers = ask([task for task, _ in asked])
    right = iter(list(a[:size]) == step for a, (_, step) in zip(answers, asked, strict=True))
    return [[next(right) for _ in range(n)] for n in number]


def axes(world: TextWorld, ask: Ask, tasks: Sequence[Task]) -> list[dict[str, float]]:
    """Of each task all that is measured of it: 1 or 0, differences of them, and a share of steps."""
    plain = success(world, ask, tasks)
    found = [{"success": rate} for rate in plain]
    for kind in AIDS:
        helped = success(world, ask, [world.aided(task, kind) for task in tasks])
        neutral = success(world, ask, [shuffled(world, task, kind) for task in tasks])
        for at, row in enumerate(found):
            row |= {f"Δ {kind}": helped[at] - plain[at], f"Δ shuffled {kind}": neutral[at] - plain[at]}
    for row, steps in zip(found, parts_solved(world, ask, tasks), strict=True):
        row |= {"sub-problems": fmean(steps), "all of them": float(all(steps))}
    return found


def means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: fmean(row[name] for row in rows) for name in rows[0]}
