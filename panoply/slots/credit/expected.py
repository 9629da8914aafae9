"""Credit against what a model beside the policy expects of a task, before it has seen what this episode earned."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.experience import Experience
from panoply.parts import Finding, part
from panoply.slots.credit.groups import episode_returns


def _equation(held: Any) -> str:
    return (
        "A = R − v̂(task)"
        if held.scale == "none"
        else "A = R − v̂(task), then (A − mean_batch(A)) / (std_batch(A) + ε)"
    )


def _inert(held: Any, method: Any) -> list[Finding]:
    return [("epsilon", "scale is none")] if held.scale == "none" else []


@part(
    "credit",
    equation=_equation,
    needs={"column:expected"},
    inert=_inert,
    bounds={"epsilon": "from 0 to 1"},
)
def over_expected(
    experience: Experience, *, scale: Literal["batch", "none"] = "batch", epsilon: float = 1e-8
) -> Tensor:
    """An episode's return minus what was expected of its task (column `expected`): one episode a task is enough.

    scale: `batch` takes the mean of all episodes' differences away and divides by their deviation; where all differ
           alike they are 0. `none` leaves them as they are.
    """
    episodes, returns = experience.by("episode"), episode_returns(experience)[0]
    advantage = returns - episodes.first(experience["expected"]).to(returns.dtype)
    return episodes.rows(advantage if scale == "none" else standardised(advantage, epsilon))


def standardised(values: Tensor, epsilon: float) -> Tensor:
    """In deviations from the mean; all 0 where they are all the same."""
    if bool((values == values[:1]).all()):
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + epsilon)
