"""Data made by asking a world's annotators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from panoply.errors import PanoplyError
from panoply.experience import Experience, Ragged, Table
from panoply.parts import Finding, part
from panoply.rollout.collector import in_epochs
from panoply.seeds import numpy_rng
from panoply.slots.sample.answers import answers_of

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task

Pair = tuple[list[int], list[int]]
AGAIN = 4
"""How often a second answer is drawn to be another than the first."""
TRIES = 64
"""How often further tasks are taken in place of those that have but one answer."""


def _needs(held: Any) -> frozenset[str]:
    return frozenset({"world:prefer"} | ({"world:teacher"} if held.answers == "teacher" else set()))


def _impossible(held: Any, method: Any) -> list[Finding]:
    found = [
        (name, "it is a number of things") for name in ("pairs", "annotators") if getattr(held, name) < 0
    ]
    if held.answers == "start" and not held.pairs:
        reason = "the starting policy answers before the first step only; say how many pairs with data.pairs"
        found.append(("answers", reason))
    if held.without is not None and not 0 <= held.without[0] < held.without[1] > 1:
        found.append(
            ("without", "it is a number and what it is the rest of, such as 0,2 for every second pair")
        )
    return found


def _equation(held: Any) -> str:
    whose = "the world's teacher" if held.answers == "teacher" else "the starting policy"
    known = f"of {held.pairs} " if held.pairs else ""
    return f"{held.batch} {known}pairs a step: two answers of {whose}, the preferred one first"


@part(
    "data",
    equation=_equation,
    needs=_needs,
    state=dict,
    impossible=_impossible,
    inert=lambda held, method: [] if held.pairs else [("without", "data.pairs is 0")],
    gives={"pairs"},
    bounds={
        "batch": "at least 1",
        "pairs": "at least 0",
        "annotators": "at least 0",
        "without": "at least 0",
    },
)
def preferences(
    state: dict[str, Any],
    collect: Collector,
    *,
    batch: int = 64,
    pairs: int = 0,
    answers: Literal["teacher", "start"] = "teacher",
    annotators: int = 0,
    without: tuple[int, int] | None = None,
) -> tuple[dict[str, Any], Experience]:
    """Two different answers to each task, ordered by the world's preference.

    Where both are the same one is drawn again, and a task to which there is but one answer is passed over.

    pairs       how many there are, gone through in a new order again and again; 0 makes new ones for ever
    answers     whose answers are compared: of the world's teacher, or of the policy before its first step
    annotators  how many people are asked, each in turn; who it was stands in the pairs' column `annotator`.
                0 asks anyone, and does not say whom
    without     which pairs of a set are left out, for others to be judged by: `0,2` those whose number is even

    Of a set that is gone through again and again, the pairs' column `pair` is the number of each in it.
    """
    if not pairs:
        first = collect.state["episodes"] // 2
        asked = [(first + i) % annotators for i in range(batch)] if annotators else None
        places, ordered = _ordered(collect, batch, answers, asked)
        return state, _experience(collect, collect.numbered(places), ordered, asked)
    if not state:
        state = pair_set(collect, pairs, answers, annotators)
    kept = [row for row in range(pairs) if without is None or row % without[1] != without[0]]
    rows = [kept[at] for at in in_epochs(collect.seed, state["next"], batch, len(kept))]
    tasks = collect.numbered(state["places"][rows].tolist())
    told = Ragged(state["tokens"], state["offsets"])
    chosen = [(told[2 * row].tolist(), told[2 * row + 1].tolist()) for row in rows]
    asked = [row % annotators for row in rows] if annotators else None
    found = _experience(collect, tasks, chosen, asked)
    assert found.pairs is not None
    numbered = found.with_pairs(Table({**found.pairs, "pair": torch.tensor(rows)}))
    return {**state, "next": state["next"] + batch}, numbered


def pair_set(collect: Collector, pairs: int, answers: str, annotators: int) -> dict[str, Any]:
    """A data set, as it is remembered: which tasks, and the preferred answer before the other.

    Of a teacher's answers it is the same in all runs of a seed.
    """
    asked = [i % annotators for i in range(pairs)] if annotators else None
    places, ordered = _ordered(collect, pairs, answers, asked)
    told = Ragged.from_lists([answer for pair in ordered for answer in pair])
    return {"next": 0, "places": torch.tensor(places), "tokens": told.values, "offsets": told.offsets}


def _ordered(
    collect: Collector, number: int, answers: str, asked: Sequence[int] | None
) -> tuple[list[int], list[Pair]]:
    """So many pairs of different answers to the next tasks, the preferred one first, and the numbers of the tasks."""
    world = collect.world
    people: Sequence[int | None] = asked or [None] * number
    places: list[int] = []
    ordered: list[Pair] = []
    for _ in range(TRIES):
        first, place = collect.state["episodes"], collect.state["tasks"]
        tasks = collect.tasks(number - len(ordered))
        rngs = [numpy_rng("preferences", collect.seed, first + i) for i in range(len(tasks))]
        told = _own(collect, tasks) if answers == "start" else _taught(collect, tasks, rngs)
        for i, (task, (a, b), rng) in enumerate(zip(tasks, told, rngs, strict=True)):
            if a != b:
                who = people[len(ordered)]
                places.append(place + i)
                ordered.append((a, b) if world.prefer(task, a, b, rng, who) else (b, a))
        if len(ordered) == number:
            collect.notes = {**collect.notes, "questions": float(number)}
            return places, ordered
    whose = "teacher" if answers == "teacher" else "starting policy"
    raise PanoplyError(
        f"The {whose} of {world.name} has two different answers to too few of its tasks to compare them."
    )


def _taught(collect: Collector, tasks: Sequence[Task], rngs: Sequence[np.random.Generator]) -> list[Pair]:
    """Two answers of the world's teacher, drawn again a few times where they are the same."""
    told = []
    for task, rng in zip(tasks, rngs, strict=True):
        a = b = collect.world.demonstrate(task, rng)
        for _ in range(AGAIN):
            if (b := collect.world.demonstrate(task, rng)) != a:
                break
        told.append((a, b))
    return told


def _own(collect: Collector, tasks: Sequence[Task]) -> list[Pair]:
    """Two answers of the policy as it is now, drawn again a few times where they are the same."""
    drawn = answers_of(collect.episodes(tasks, 2))
    told = list(zip(drawn[::2], drawn[1::2], strict=True))
    for _ in range(AGAIN - 1):
        same = [i for i, (a, b) in enumerate(told) if a == b]
        if not same:
            break
        for i, again in zip(same, answers_of(collect.episodes([tasks[i] for i in same], 1)), strict=True):
            told[i] = (told[i][0], again)
    return told


def _experience(
    collect: Collector, tasks: Sequence[Task], ordered: Sequence[Pair], asked: Sequence[int] | None
) -> Experience:
    experience = collect.preferred(tasks, [a for a, _ in ordered], [b for _, b in ordered])
    if asked is None:
        return experience
    assert experience.pairs is not None
    return experience.with_pairs(Table({**experience.pairs, "annotator": torch.tensor(asked)}))
