"""Data that an earlier stage of a recipe has made (see data_folder.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from panoply import data_folder
from panoply.experience import DEMONSTRATION, Experience
from panoply.parts import part
from panoply.rollout.collector import in_epochs

if TYPE_CHECKING:
    from panoply.data_folder import Row
    from panoply.rollout.text import Collector

LIMITS = {"batch": "at least 1"}


@part("data", equation="{batch} stored answers a step, of {folder}", needs={"world:text"}, bounds=LIMITS)
def stored(collect: Collector, *, folder: str = "", batch: int = 128) -> Experience:
    """Answers of a data folder, to be imitated: all of them once, then all in another order."""
    rows = _next(collect, data_folder.read(folder, "answer"), collect.state["episodes"], batch)
    tasks = data_folder.tasks_of(rows, collect)
    return collect.answers(tasks, [row["answer"] for row in rows], source=DEMONSTRATION)


@part(
    "data",
    equation="{batch} stored pairs a step, of {folder}",
    needs={"world:text"},
    gives={"pairs"},
    bounds=LIMITS,
)
def stored_pairs(
    collect: Collector, *, folder: str = "", batch: int = 64, shuffled: bool = True
) -> Experience:
    """Pairs of a data folder, the better answer first.

    shuffled: all of them once, then all in another order; or again and again as they stand in the folder
    """
    found, first = data_folder.read(folder, "chosen"), collect.state["episodes"] // 2
    if shuffled:
        rows = _next(collect, found, first, batch)
    else:
        rows = [found[at % len(found)] for at in range(first, first + batch)]
    tasks = data_folder.tasks_of(rows, collect)
    return collect.preferred(tasks, [row["chosen"] for row in rows], [row["rejected"] for row in rows])


def _next(collect: Collector, rows: list[Row], first: int, batch: int) -> list[Row]:
    return [rows[at] for at in in_epochs(collect.seed, first, batch, len(rows))]
