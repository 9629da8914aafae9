"""Groups mended after sampling: which of them taught nothing, and other episodes in the place of theirs.

hard = failed(found)
again = collect.episodes([world.hint(t, 0.5) for t in tasks_of(found, hard, tasks)], 8, into=hard)
found = replaced(found, episodes_of(found, hard), again)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from panoply.experience import Experience


class HasId(Protocol):
    @property
    def id(self) -> int: ...


T = TypeVar("T", bound=HasId)


def failed(experience: Experience, name: str = "success") -> Tensor:
    """Keys of the groups in which no episode earned the signal."""
    episodes, groups = experience.by("episode"), experience.by("group")
    earned = episodes.rows(episodes.sum(experience[f"signal:{name}"]))
    return groups.keys[groups.max(earned) <= 0]


def episodes_of(experience: Experience, groups: Tensor) -> Tensor:
    """Keys of the episodes of these groups, in the order in which they were sampled."""
    episodes = experience.by("episode")
    return episodes.keys[torch.isin(episodes.first(experience["group"]), groups)]


def tasks_of(experience: Experience, groups: Tensor, tasks: Sequence[T]) -> list[T]:
    """What was asked in each of these groups, out of the tasks that were sampled from."""
    asked, known = {task.id: task for task in tasks}, experience.by("group")
    ids = known.first(experience["task"])[torch.searchsorted(known.keys, groups)]
    return [asked[i] for i in ids.tolist()]


def replaced(experience: Experience, out: Tensor, by: Experience) -> Experience:
    """Experience without the episodes `out`, and with all of `by`, which were sampled or given `into` its groups.

    A number that only some rows have is NaN on the others: answers that were given have no `logp`.
    """
    return Experience.mix([experience.take(~torch.isin(experience["episode"], out)), by])
