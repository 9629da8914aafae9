"""What the tests of methods with hints share: a collector whose answers are right where a rule says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from panoply.experience import OWN, Experience
from panoply.rollout.collector import Given
from panoply.worlds.text.chain import Chain
from panoply.worlds.world import Task

Rule = Callable[[int, int, int], bool]
"""Whether an answer is right, by the number of its task, by how many steps it was given, and by its place in a call."""
STEPS = 8


class Scripted(Given):
    """Gives the reference answer, or one that ends at once, and keeps what it was asked."""

    def __init__(self, right: Rule, version: int = 100, world: Chain | None = None):
        self.world, self.seed, self.split, self.version = (
            world or Chain(operations=STEPS),
            3,
            "train",
            version,
        )
        self.state = {"tasks": 0, "groups": 0, "episodes": 0, "decisions": 0}
        self.right, self.asked, self.known = right, [], {}
        self.asked: list[list[tuple[int, int]]] = []
        """Of each call: the number of the task, and how many steps it was given, of every episode."""
        self.known: dict[int, int] = {}

    def episodes(
        self,
        tasks: Sequence[Task],
        group: int | Sequence[int] = 1,
        *,
        into: Tensor | None = None,
        **drawn: Any,
    ) -> Experience:
        every, keys = self._groups(tasks, group, into)
        numbers = [self.known.setdefault(task.id, len(self.known)) for task in every]
        steps = [len(task.given) // self.world.step_tokens for task in every]
        self.asked.append(list(zip(numbers, steps, strict=True)))
        answers = [
            self.world.gold(task)[0 if self.right(number, shown, at) else -1 :]
            for at, (task, number, shown) in enumerate(zip(every, numbers, steps, strict=True))
        ]
        made = self.answers(every, answers, into=torch.tensor(keys), source=OWN)
        return made.with_columns(logp=torch.full((len(made),), -1.0))


def outcomes(found: Experience) -> dict[int, list[float]]:
    """The success of each group's episodes, by the group's place, in the order in which they were sampled."""
    episodes = found.by("episode")
    groups, won = episodes.first(found["group"]), episodes.sum(found["signal:success"])
    places = {key: at for at, key in enumerate(sorted(set(groups.tolist())))}
    made: dict[int, list[float]] = {at: [] for at in places.values()}
    for key, one in zip(groups.tolist(), won.tolist(), strict=True):
        made[places[key]].append(one)
    return made


def given_steps(found: Experience, world: Chain) -> dict[int, list[int]]:
    """How many steps stood in the prompt of each of a group's episodes, by the group's place."""
    episodes = found.by("episode")
    bare = 2 * world.operations + 2
    prompts = found.context["shared"][episodes.first(found["context"])]
    groups = episodes.first(found["group"]).tolist()
    places = {key: at for at, key in enumerate(sorted(set(groups)))}
    made: dict[int, list[int]] = {at: [] for at in places.values()}
    for key, size in zip(groups, prompts.tolist(), strict=True):
        made[places[key]].append((size - bare) // world.step_tokens)
    return made
