"""Answers that somebody has rated, several to a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from panoply.costs import Lengths, Tokens
from panoply.experience import DEMONSTRATION, Experience, Ragged, Table
from panoply.parts import part
from panoply.seeds import numpy_rng

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


def _cost(held: Any, of: Lengths) -> Tokens:
    return 0, held.batch * (of.prompt + held.answers * of.context)


@part(
    "data",
    equation="{batch} prompts a step, each with up to {answers} rated answers, the best first",
    needs={"world:lists"},
    gives={"lists"},
    cost=_cost,
    bounds={"batch": "at least 1", "answers": "at least 2"},
)
def rated(collect: Collector, *, batch: int = 16, answers: int = 8) -> Experience:
    """Lists that were brought along, ranked by their ratings (table `lists`, with the rating as `worth`).

    answers   of a longer list the best, the worst, and as many others by lot, other ones each time
    """
    tasks, first = collect.tasks(batch), collect.state["groups"]
    collect.state["groups"] += batch
    lists = []
    for i, task in enumerate(tasks):
        several = collect.world.rated_answers(task)
        lists.append([several[at] for at in _some(len(several), answers, collect.seed, first + i)])
    of = torch.tensor([i for i, several in enumerate(lists) for _ in several])
    said = [answer for several in lists for answer, _ in several]
    made = collect.answers([tasks[i] for i in of.tolist()], said, into=first + of, source=DEMONSTRATION)
    ends = torch.tensor([0, *map(len, lists)]).cumsum(0)
    worth = torch.tensor([worth for several in lists for _, worth in several])
    members = {"episodes": Ragged(made.by("episode").keys, ends), "worth": Ragged(worth, ends)}
    return made.with_lists(Table(members))


def _some(there: int, wanted: int, seed: int, visit: int) -> list[int]:
    """Places in a list, in their order: all, or the first, the last and others by lot."""
    if there <= wanted:
        return list(range(there))
    between = numpy_rng("rated", seed, visit).choice(there - 2, wanted - 2, replace=False) + 1
    return [0, *sorted(between.tolist()), there - 1]
