"""A text of an expert's, read line by line by a policy that may say something before each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from panoply.experience import Experience
from panoply.rollout.answer_likelihood import likelihoods
from panoply.rollout.text import Collector
from panoply.selves import LEARNER
from panoply.worlds.world import Task


@dataclass(frozen=True)
class ReadThrough:
    """What came of it, in a world with `lines` (`world.lines(task)`, `world.before_line(task, said)`)."""

    found: list[Experience]
    """The marks that were drawn, a group for each line. `signal:likelihood` is log π of the line that follows."""
    texts: list[list[int]]
    """Of each task the whole text, marks and lines: the first mark of every group is the one that stays."""


@torch.no_grad()
def read_through(
    collect: Collector,
    tasks: Sequence[Task],
    group: int = 1,
    *,
    temperature: float = 1.0,
    by: str = LEARNER,
) -> ReadThrough:
    """Before each line of an expert's text draw a group of marks, and ask how likely the line is after each of them.

    A mark sees what comes before its line, and never the line. Marks of a group were drawn after the same tokens. What
    is asked for is the very next line and nothing after it: Σ over its tokens of log π, at temperature 1.

    by: whose π that is (`reference`: see panoply/selves.py)
    """
    world: Any = collect.world
    lines, texts = [world.lines(task) for task in tasks], [list[int]() for _ in tasks]
    found = []
    for at in range(max(map(len, lines))):
        live = [i for i, text in enumerate(lines) if at < len(text)]
        asked = [world.before_line(tasks[i], texts[i]) for i in live]
        drawn = collect.episodes(asked, group, temperature=temperature)
        marks = _marks(drawn)
        follows = [lines[i][at] for i in live for _ in range(group)]
        before = [task.prompt for task in asked for _ in range(group)]
        questions = [((*b, *m), tuple(line)) for b, m, line in zip(before, marks, follows, strict=True)]
        with collect.acted_by(by):
            mean = likelihoods(collect.policy, questions)
        told = mean * torch.tensor([len(line) for line in follows])
        episodes = drawn.by("episode")
        column = torch.where(episodes.is_last(), episodes.rows(told), 0.0)
        found.append(drawn.with_columns(**{"signal:likelihood": column}))
        for i, mark in zip(live, marks[::group], strict=True):
            texts[i] += [*mark, *lines[i][at]]
    return ReadThrough(found, texts)


def _marks(drawn: Experience) -> list[list[int]]:
    """What each episode said, without its end."""
    grid = drawn.by("episode").grid().tolist()
    return [[int(drawn["action"][row]) for row in rows if row >= 0][:-1] for rows in grid]
