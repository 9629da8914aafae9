"""What was said in each episode, as lists that a world can be asked about, and what it says of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from panoply.errors import PanoplyError, Resumable
from panoply.experience import Experience

if TYPE_CHECKING:
    import numpy as np

    from panoply.worlds.world import Task, TextWorld


def answers_of(experience: Experience) -> list[list[int]]:
    """What was said in each episode, in all its turns, in the order of `by("episode")`."""
    rows, action = experience.by("episode").grid(), experience["action"]
    return [action[row[row >= 0]].tolist() for row in rows]


def on_tokens(experience: Experience, numbers: Sequence[Sequence[float]]) -> Tensor:
    """A column of one number for every token that `answers_of` lists."""
    rows = experience.by("episode").grid()
    column = torch.zeros(len(experience))
    column[rows[rows >= 0]] = torch.tensor([float(x) for each in numbers for x in each])
    return column


def preference_of(world: TextWorld, task: Task, a: Sequence[int], b: Sequence[int]) -> float:
    """How likely a world's annotators prefer the first of two answers; what is no probability ends the run."""
    p = float(world.preference(task, a, b))
    if not 0 <= p <= 1:
        raise Resumable(f"A preference is a probability, from 0 to 1, and {world.name} gave {p:g}.")
    return p


def judged_steps(
    world: TextWorld, task: Task, answer: Sequence[int], rngs: Sequence[np.random.Generator]
) -> tuple[list[tuple[int, int]], Tensor]:
    """The steps of an answer, as places among its tokens, and [readings, steps] of whether a judge finds them right.

    The judge sees the task and the answer, and never what it earned. One that raises, or says more or less than there
    are steps, ends the run with a sentence; what was finished is kept.
    """
    try:
        spans = world.spans(task, answer)
        said = [world.judge(task, answer, rng) for rng in rngs]
    except PanoplyError:
        raise
    except Exception as error:  # whatever a judge of one's own may raise
        raise Resumable(
            f"The judge of {world.name} raised {type(error).__name__} on an answer of {len(answer)} tokens: {error}"
        ) from error
    ends = [0, *(place for span in spans for place in span), len(answer)]
    if any(before > after for before, after in pairwise(ends)):
        raise Resumable(
            f"The steps of {world.name} are ranges of an answer's {len(answer)} tokens, one after another, not {spans}."
        )
    for verdicts in said:
        if len(verdicts) != len(spans):
            raise Resumable(
                f"The judge of {world.name} gave {len(verdicts)} verdicts on an answer of {len(spans)} steps."
            )
    return spans, torch.tensor(said, dtype=torch.bool).view(len(said), len(spans))
