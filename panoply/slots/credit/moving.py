"""Credit against a moving average of what was earned before."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from panoply.experience import Experience
from panoply.parts import part
from panoply.slots.credit.groups import episode_returns


@part(
    "credit",
    equation="A = R − b,  b ← {decay}·b + (1 − {decay})·mean(R)",
    state=lambda: {"baseline": None},
    bounds={"decay": "from 0 to 1"},
)
def moving_baseline(
    state: dict[str, Any], experience: Experience, *, decay: float = 0.9
) -> tuple[dict[str, Any], Tensor]:
    """Each episode's return minus an average of earlier batches' (Williams 1992, reinforcement comparison).

    The baseline never sees the batch it is used on, so the gradient stays unbiased; the first batch has none.
    """
    returns, _ = episode_returns(experience)
    mean, baseline = float(returns.mean()), state["baseline"]
    moved = mean if baseline is None else decay * baseline + (1 - decay) * mean
    advantage = returns - (0.0 if baseline is None else baseline)
    return {"baseline": moved}, experience.by("episode").rows(advantage)
