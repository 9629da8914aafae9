"""Own episodes on tasks that an earlier stage of a recipe has chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from panoply import data_folder
from panoply.experience import Experience
from panoply.parts import part
from panoply.slots.sample.groups import LIMITS, greedy_cuts, greedy_groups

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


@part(
    "sample",
    equation="{prompts} prompts of {folder} × {group} episodes at temperature {temperature}",
    needs={"world:text"},
    bounds=LIMITS,
    impossible=greedy_groups,
    inert=greedy_cuts,
)
def among(
    collect: Collector,
    *,
    folder: str = "",
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    max_tokens: int | None = None,
) -> Experience:
    """Tasks of a data folder (`make.bucket`), all of them once and then in another order, and a group for each."""
    rows = data_folder.read(folder, "task")
    chosen = [rows[at] for at in collect.shuffled(prompts, len(rows))]
    return collect.episodes(
        data_folder.tasks_of(chosen, collect),
        group,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
    )
