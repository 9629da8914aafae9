"""Credit by what was earned from a decision on."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from panoply.experience import SYNTHETIC, Experience, Segments
from panoply.parts import part


def in_time(experience: Experience) -> Tensor:
    """Row numbers ordered by episode and, inside one, by turn and position: the order in which they happened."""
    order = torch.arange(len(experience), device=experience["episode"].device)
    for key in ("position", "turn", "episode"):
        if key in experience:
            order = order[experience[key][order].argsort(stable=True)]
    return order


def to_go(experience: Experience, reward: Tensor, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + γ·G_{t+1} inside each episode, for every decision."""
    order = in_time(experience)
    found = torch.empty_like(reward)
    found[order] = Segments(experience["episode"][order]).to_go(reward[order], gamma)
    return found


def place(experience: Experience) -> Tensor:
    """How many decisions of its episode came before each."""
    episodes, order = experience.by("episode"), in_time(experience)
    before = episodes.count.cumsum(0) - episodes.count
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order), device=order.device) - before[episodes.index[order]]
    return found


@part(
    "credit",
    equation=lambda held: (
        "A = normalised over the batch(G)" if held.normalise else "A = G,  G_t = Σ_{s≥t} r_s"
    ),
    bounds={"gamma": "from 0 to 1", "epsilon": "from 0 to 1"},
)
def return_to_go(
    experience: Experience, *, gamma: float = 1.0, normalise: bool = True, epsilon: float = 1e-8
) -> Tensor:
    """Each decision's own return, from there to the end, less the batch's mean and over its deviation.

    The batch is the baseline (REINFORCE++, arXiv 2501.03262), so a group of one episode is enough. Returns that are
    all equal give 0. Rows of a synthetic stream, which nobody has earned anything with, are in no mean and get 0.
    """
    returns = to_go(experience, experience["reward"].float(), gamma)
    if not normalise:
        return returns
    if "source" in experience and bool((given := experience["source"] == SYNTHETIC).any()):
        return torch.where(given, 0.0, _normalised(returns, returns[~given], epsilon))
    return _normalised(returns, returns, epsilon)


def _normalised(returns: Tensor, among: Tensor, epsilon: float) -> Tensor:
    """Less the mean of some of them and over their deviation; where those are all equal, 0."""
    if bool((among == among[:1]).all()):
        return torch.zeros_like(returns)
    return (returns - among.mean()) / (among.std(correction=0) + epsilon)


def _equation(held: Any) -> str:
    paid = (
        "Σ_s≥t r_s" if held.gamma == 1 else f"Σ_s≥t {held.gamma:g}^{'s' if held.discounted else '(s−t)'}·r_s"
    )
    baseline = " − mean of the other episodes at the same place" if held.baseline == "others" else ""
    return f"A = {paid}{baseline}" + (", over its size" if held.normalise else "")


@part("credit", equation=_equation, bounds={"gamma": "from 0 to 1", "epsilon": "from 0 to 1"})
def over_others(
    experience: Experience,
    *,
    gamma: float = 1.0,
    discounted: bool = False,
    baseline: Literal["others", "none"] = "others",
    normalise: bool = True,
    epsilon: float = 1e-8,
) -> Tensor:
    """What is earned from a decision on, less what other episodes earn from the same place on (GPOMDP).

    An episode's own return is not in its baseline, so the gradient is unbiased; where there is no other, it is 0.

    discounted   by the time since the episode began, as the discounted objective's gradient is; else since the decision
    normalise    divide by one number for the whole batch, the root of the mean square
    """
    found = to_go(experience, experience["reward"].float(), gamma)
    at = place(experience)
    if baseline == "others":
        places = Segments(at)
        found = found - (places.rows(places.sum(found)) - found) / (places.rows(places.count) - 1).clamp(
            min=1
        )
    if discounted:
        found = found * gamma**at
    if not normalise or bool((found == 0).all()):
        return found
    return found / (torch.sqrt((found**2).mean()) + epsilon)
