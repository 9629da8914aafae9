"""Rounds over a pool of prompts: the never solved are searched again, the rarely solved have right answers beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from panoply.experience import REPLAY, Experience, Ragged, Segments
from panoply.rollout.collector import in_epochs
from panoply.slots.sample.answers import answers_of
from panoply.slots.task_memory import TaskMemory

if TYPE_CHECKING:
    from panoply.rollout.text import Collector
    from panoply.worlds.world import Task


def asked(
    state: dict[str, Any], collect: Collector, prompts: int, pool: int, rare: float
) -> tuple[dict[str, Any], list[int], list[int]]:
    """The numbers of the tasks that are searched in this step, and of those answered beside cached answers."""
    if not pool:
        return state, [0] * prompts, []
    if not state:
        collect.tasks(pool)
        state = {
            "round": 0,
            "at": 0,
            "search": torch.arange(pool),
            "recall": torch.zeros(0, dtype=torch.long),
        }
    left = len(state["search"]) + len(state["recall"]) - state["at"]
    if left <= 0:
        state = _next_round(state, collect, pool, rare)
        left = len(state["search"]) + len(state["recall"])
    every = torch.cat([state["search"], state["recall"]])
    order = in_epochs(collect.seed + state["round"], 0, len(every), len(every))
    here = order[state["at"] : state["at"] + min(prompts, left)]
    number = len(state["search"])
    search, recall = ([int(every[i]) for i in here if (i < number) is yes] for yes in (True, False))
    return {**state, "at": state["at"] + len(here)}, search, recall


def _all(pool: int) -> dict[str, Tensor]:
    return {"search": torch.arange(pool), "recall": torch.zeros(0, dtype=torch.long)}


def _next_round(state: dict[str, Any], collect: Collector, pool: int, rare: float) -> dict[str, Any]:
    """Never solved: searched again; rarely: answered beside what was right; where neither is left, all anew."""
    numbers = torch.arange(pool)
    ids = torch.tensor([task.id for task in collect.numbered(range(pool))])
    known = TaskMemory.of(state).look(ids, won=0.0, ever=0.0)
    never, seldom = known["ever"] == 0, (known["ever"] > 0) & (known["won"] <= rare)
    if not bool((never | seldom).any()):
        return {"round": state["round"] + 1, "at": 0, **_all(pool)}
    return {
        **state,
        "round": state["round"] + 1,
        "at": 0,
        "search": numbers[never],
        "recall": numbers[seldom],
    }


def recalled(
    collect: Collector, memory: TaskMemory, tasks: Sequence[Task], group: int, temperature: float
) -> list[Experience]:
    """Groups of own answers in which some are right ones of an earlier round."""
    ids = torch.tensor([task.id for task in tasks])
    kept = [_unpacked(row)[:group] for row in memory.look(ids, answers=())["answers"].tolist()]
    first = collect.state["groups"]
    collect.state["groups"] += len(tasks)
    into = first + torch.arange(len(tasks))
    found = []
    asking = [i for i, cached in enumerate(kept) if len(cached) < group]
    if asking:
        sizes = [group - len(kept[i]) for i in asking]
        own = collect.episodes([tasks[i] for i in asking], sizes, into=into[asking], temperature=temperature)
        found.append(own)
    place = [i for i, cached in enumerate(kept) for _ in cached]
    if place:
        said = [answer for cached in kept for answer in cached]
        cached = collect.answers([tasks[i] for i in place], said, into=into[place], source=REPLAY)
        with torch.no_grad():
            found.append(cached.with_columns(logp=collect.policy.score(cached)["logp"].cpu()))
    return [rows.with_columns(node_value=_outcomes(rows)) for rows in found]


def _outcomes(rows: Experience) -> Tensor:
    episodes = rows.by("episode")
    right = episodes.sum(rows["signal:success"]) > 0
    return episodes.rows(torch.where(right, 1.0, -1.0))


def noted(state: dict[str, Any], made: Experience, most: int) -> dict[str, Any]:
    """Of every task of the step: the share of own answers that were right, and up to so many right ones ever."""
    episodes, memory = made.by("episode"), TaskMemory.of(state)
    right, own = episodes.sum(made["signal:success"]) > 0, episodes.first(made["source"]) != REPLAY
    asked = Segments(episodes.first(made["task"]))
    tried = asked.sum(own.float())
    won = asked.sum((right & own).float()) / tried.clamp(min=1)
    known = memory.look(asked.keys, answers=(), ever=0.0)
    said, rows = answers_of(made), []
    for i, before in enumerate(known["answers"].tolist()):
        mine = ((asked.index == i) & right & own).nonzero().flatten().tolist()
        every = {tuple(answer): None for answer in [*_unpacked(before), *(said[e] for e in mine)]}
        rows.append(_packed([list(answer) for answer in every][:most]))
    ever = torch.tensor([float(len(row) > 0) for row in rows])
    written = memory.write(asked.keys, won=won, ever=ever, answers=Ragged.from_lists(rows))
    return {**state, **written.state()}


def _packed(answers: Sequence[Sequence[int]]) -> list[int]:
    """Several answers in one list, each after its length."""
    return [token for answer in answers for token in (len(answer), *answer)]


def _unpacked(row: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = []
    at = 0
    while at < len(row):
        found.append(list(row[at + 1 : at + 1 + row[at]]))
        at += 1 + row[at]
    return found
