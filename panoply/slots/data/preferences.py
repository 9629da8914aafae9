"""Data made by asking a world's annotators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from panoply.experience import Experience, Ragged, Table
from panoply.parts import Finding, part
from panoply.rollout.collector import in_epochs
from panoply.seeds import numpy_rng
from panoply.slots.sample.answers import answers_of

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task

Pair = tuple[list[int], list[int]]


def _needs(held: Any) -> frozenset[str]:
    return frozenset({"world:prefer"} | ({"world:teacher"} if held.answers == "teacher" else set()))


def _impossible(held: Any, method: Any) -> list[Finding]:
    found = [
        (name, "it is a number of things") for name in ("pairs", "annotators") if getattr(held, name) < 0
    ]
    if held.answers == "start" and not held.pairs:
        reason = "the starting policy answers before the first step only; say how many pairs with data.pairs"
        found.append(("answers", reason))
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
    gives={"pairs"},
    bounds={"batch": "at least 1", "pairs": "at least 0", "annotators": "at least 0"},
)
def preferences(
    state: dict[str, Any],
    collect: Collector,
    *,
    batch: int = 64,
    pairs: int = 0,
    answers: Literal["teacher", "start"] = "teacher",
    annotators: int = 0,
) -> tuple[dict[str, Any], Experience]:
    """Two answers to each task, ordered by the world's preference.

    pairs       how many there are, gone through in a new order again and again; 0 makes new ones for ever
    answers     whose answers are compared: of the world's teacher, or of the policy before its first step
    annotators  how many people are asked, each in turn; who it was stands in the pairs' column `annotator`.
                0 asks anyone, and does not say whom
    """
    if not pairs:
        first = collect.state["episodes"] // 2
        tasks = collect.tasks(batch)
        asked = [(first + i) % annotators for i in range(batch)] if annotators else None
        return state, _experience(collect, tasks, _ordered(collect, tasks, answers, asked), asked)
    if not state:
        state = _set(collect, pairs, answers, annotators)
    rows = in_epochs(collect.seed, state["next"], batch, pairs)
    tasks = collect.numbered(state["first"] + row for row in rows)
    told = Ragged(state["tokens"], state["offsets"])
    chosen = [(told[2 * row].tolist(), told[2 * row + 1].tolist()) for row in rows]
    asked = [row % annotators for row in rows] if annotators else None
    return {**state, "next": state["next"] + batch}, _experience(collect, tasks, chosen, asked)


def _set(collect: Collector, pairs: int, answers: str, annotators: int) -> dict[str, Any]:
    """A data set, as it is remembered: which tasks, and the preferred answer before the other."""
    first = collect.state["tasks"]
    tasks = collect.tasks(pairs)
    asked = [i % annotators for i in range(pairs)] if annotators else None
    told = Ragged.from_lists([a for pair in _ordered(collect, tasks, answers, asked) for a in pair])
    return {"next": 0, "first": first, "tokens": told.values, "offsets": told.offsets}


def _ordered(
    collect: Collector, tasks: Sequence[Task], answers: str, asked: Sequence[int] | None
) -> list[Pair]:
    """Two answers to each task, the preferred one first."""
    first, world = collect.state["episodes"], collect.world
    rngs = [numpy_rng("preferences", collect.seed, first + i) for i in range(len(tasks))]
    if answers == "start":
        told = _own(collect, tasks)
    else:
        told = [
            (world.demonstrate(t, rng), world.demonstrate(t, rng)) for t, rng in zip(tasks, rngs, strict=True)
        ]
    people: Sequence[int | None] = asked or [None] * len(tasks)
    return [
        (a, b) if world.prefer(task, a, b, rng, who) else (b, a)
        for task, (a, b), rng, who in zip(tasks, told, rngs, people, strict=True)
    ]


def _own(collect: Collector, tasks: Sequence[Task]) -> list[Pair]:
    """Two answers of the policy as it is now."""
    told = answers_of(collect.episodes(tasks, 2))
    return list(zip(told[::2], told[1::2], strict=True))


def _experience(
    collect: Collector, tasks: Sequence[Task], ordered: Sequence[Pair], asked: Sequence[int] | None
) -> Experience:
    experience = collect.preferred(tasks, [a for a, _ in ordered], [b for _, b in ordered])
    if asked is None:
        return experience
    assert experience.pairs is not None
    return experience.with_pairs(Table({**experience.pairs, "annotator": torch.tensor(asked)}))
