"""Annotators of worlds in which an answer's worth is a number: who is worth more is preferred, mostly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from panoply.worlds.world import Task, TextWorld


def preferred(difference: float, sharpness: float) -> float:
    """σ(sharpness · difference of worth): how likely the first of two answers is preferred."""
    return 0.5 + 0.5 * math.tanh(sharpness * difference / 2)


def flipped(chance: float, noise: float) -> float:
    """The same chance, by somebody who says the opposite that often."""
    return (1 - noise) * chance + noise * (1 - chance)


class StepAnnotators(TextWorld):
    """Annotators of a world of steps, who go by what is right.

    The worth of an answer is the mean of `steps`, the share of its steps that are right, and `success`. So of two wrong
    answers the less wrong is preferred, and a right one to both. A world that has them has fields `sharpness` and
    `noise`; all annotators are alike.
    """

    sharpness: float
    noise: float
    annotator_bounds: ClassVar[Mapping[str, str]] = {"sharpness": "at least 0", "noise": "from 0 to 1"}

    def worth(self, task: Task, answer: Sequence[int]) -> float:
        """What an answer is worth to annotators, from 0 to 1."""
        found = self.grade(task, answer)
        return (float(found["steps"]) + float(found["success"])) / 2  # type: ignore[arg-type]

    def preference(
        self, task: Task, a: Sequence[int], b: Sequence[int], annotator: int | None = None
    ) -> float:
        difference = self.worth(task, a) - self.worth(task, b)
        return flipped(preferred(difference, self.sharpness), self.noise)
