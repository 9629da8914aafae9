"""Answers with several labels each, such as people give who rate an answer in several respects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from panoply.experience import DEMONSTRATION, Experience, Ragged
from panoply.parts import Finding, part
from panoply.rollout.collector import in_epochs
from panoply.seeds import numpy_rng
from panoply.slots.sample.answers import answers_of

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task

TOTAL = "total"
"""The label that is the sum of all others."""


def _needs(held: Any) -> frozenset[str]:
    signals = {f"signal:{name}" for name in held.names}
    return frozenset({"world:verify", *signals, *({"world:teacher"} if held.whose == "teacher" else ())})


def _impossible(held: Any, method: Any) -> list[Finding]:
    if not held.names:
        return [("names", "an answer is labelled in at least one respect")]
    if held.whose == "start" and not held.answers:
        reason = (
            "the starting policy answers before the first step only; say how many answers with data.answers"
        )
        return [("whose", reason)]
    return []


def _equation(held: Any) -> str:
    whose = "the world's teacher" if held.whose == "teacher" else "the starting policy"
    known = f"of {held.answers} " if held.answers else ""
    rated = f"{'the sum of ' if held.summed else ''}{', '.join(held.names)}"
    return f"{held.batch} {known}answers of {whose} a step, rated by {rated}"


@part(
    "data",
    equation=_equation,
    needs=_needs,
    state=dict,
    impossible=_impossible,
    bounds={"batch": "at least 1", "answers": "at least 0", "noise": "at least 0"},
)
def labelled(
    state: dict[str, Any],
    collect: Collector,
    *,
    names: tuple[str, ...] = ("success",),
    batch: int = 64,
    answers: int = 0,
    noise: float = 0.0,
    summed: bool = False,
    whose: Literal["teacher", "start"] = "teacher",
) -> tuple[dict[str, Any], Experience]:
    """Answers with a column `label:NAME` for each of some signals of the world.

    answers   how many there are, gone through in a new order again and again; 0 makes new ones for ever
    noise     the standard deviation of what is wrong with a label, which stays between 0 and 1
    summed    one label instead, `label:total`, the sum of what the others would have been
    whose     who answers: the world's teacher, or the policy before its first step
    """
    if not answers:
        tasks = collect.tasks(batch)
        said, labels = _rated(collect, tasks, names, noise, whose)
        return state, _experience(collect, tasks, said, labels, names, summed)
    if not state:
        first = collect.state["tasks"]
        said, labels = _rated(collect, collect.tasks(answers), names, noise, whose)
        told = Ragged.from_lists(said)
        state = {
            "next": 0,
            "first": first,
            "tokens": told.values,
            "offsets": told.offsets,
            "labels": labels.flatten(),
        }
    rows = in_epochs(collect.seed, state["next"], batch, answers)
    told = Ragged(state["tokens"], state["offsets"])
    tasks = collect.numbered(state["first"] + row for row in rows)
    labels = state["labels"].reshape(answers, len(names))[rows]
    found = _experience(collect, tasks, [told[row].tolist() for row in rows], labels, names, summed)
    return {**state, "next": state["next"] + batch}, found


def _rated(
    collect: Collector, tasks: Sequence[Task], names: Sequence[str], noise: float, whose: str
) -> tuple[list[list[int]], Tensor]:
    """An answer to each task, and its labels, [tasks, names]."""
    first, world = collect.state["episodes"], collect.world
    rngs = [numpy_rng("labelled", collect.seed, first + i) for i in range(len(tasks))]
    if whose == "start":
        said = answers_of(collect.episodes(tasks, 1))
    else:
        said = [world.demonstrate(task, rng) for task, rng in zip(tasks, rngs, strict=True)]
    rated = []
    for task, answer, rng in zip(tasks, said, rngs, strict=True):
        grades = world.grade(task, answer)
        worth = np.array([grades[name] for name in names], dtype=float)
        rated.append(np.clip(worth + noise * rng.standard_normal(len(names)), 0, 1))
    return said, torch.tensor(np.array(rated), dtype=torch.float32)


def _experience(
    collect: Collector,
    tasks: Sequence[Task],
    said: Sequence[Sequence[int]],
    labels: Tensor,
    names: Sequence[str],
    summed: bool,
) -> Experience:
    found = collect.answers(tasks, said, source=DEMONSTRATION)
    episodes = found.by("episode")
    columns = {TOTAL: labels.sum(1)} if summed else dict(zip(names, labels.unbind(1), strict=True))
    return found.with_columns(**{f"label:{name}": episodes.rows(column) for name, column in columns.items()})
