"""Own episodes on tasks that an earlier stage of a recipe has chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from panoply import data_folder
from panoply.experience import Experience
from panoply.parts import part
from panoply.selves import LEARNER, acts, by_whom
from panoply.slots.sample.groups import LIMITS, greedy_cuts, greedy_groups

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} prompts of {held.folder} × {held.group} episodes at temperature {held.temperature:g}"
        f"{by_whom(held.by)}"
    ),
    needs=lambda held: frozenset({"world:text"}) | acts(held.by),
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
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    max_tokens: int | None = None,
    by: str = LEARNER,
) -> Experience:
    """Tasks of a data folder (`make.bucket`), all of them once and then in another order, and a group for each.

    by: who acts, the policy that learns or another self of it (`behind:10`)
    """
    rows = data_folder.read(folder, "task")
    chosen = [rows[at] for at in collect.shuffled(prompts, len(rows))]
    with collect.acted_by(by):
        return collect.episodes(
            data_folder.tasks_of(chosen, collect),
            group,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            max_tokens=max_tokens,
        )
