"""Data that scripted players of a world have left: a log of episodes, good, bad and mixed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from panoply.experience import DEMONSTRATION, Experience
from panoply.parts import part
from panoply.rollout.collector import in_epochs

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


def _equation(held: Any) -> str:
    some = "" if held.best == 1 else f"the best {held.best:.0%} of "
    return f"{held.batch} episodes a step, of {some}{held.size} that the world's players have left"


@part(
    "data",
    equation=_equation,
    needs={"world:writers", "signal:score"},
    bounds={"batch": "at least 1", "size": "from 1 to 1000000", "best": "above 0 to 1"},
)
def log(collect: Collector, *, batch: int = 32, size: int = 1000, best: float = 1.0) -> Experience:
    """Whole episodes with what they earned, as they were played: all of them once, then all in another order.

    The log is the same in every run; only the order depends on the seed.

    best   the share of it, by return, that is learned from: imitation of the best tenth is filtered behaviour cloning
    """
    rows = _played(collect, size, best)
    number = len(rows.by("episode"))
    return collect.again(rows, in_epochs(collect.seed, collect.state["episodes"], batch, number))


def _played(collect: Collector, size: int, best: float) -> Experience:
    """The log, or the best of it, with its signals; played and graded once, by a collector that counts for itself."""
    kept: dict[tuple[int, float], Experience] = collect.__dict__.setdefault("_logs", {})
    if (size, best) not in kept:
        tasks, answers = zip(*collect.world.log(size), strict=True)  # type: ignore[attr-defined]
        other = type(collect)(collect.world, collect.policy, collect.seed, collect.split, collect.needs)
        rows = other.answers(tasks, answers, source=DEMONSTRATION)
        earned = rows.by("episode").sum(rows["signal:score"])
        chosen = earned.argsort(descending=True, stable=True)[: math.ceil(best * size)].sort().values
        kept[size, best] = rows.take(torch.isin(rows["episode"], chosen))
    return kept[size, best]
