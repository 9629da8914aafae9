"""What was said in each episode, as lists that a world can be asked about, and what it says of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from panoply.experience import Experience


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
