"""What is remembered, and how it is drawn again."""

from __future__ import annotations

from typing import Any

from panoply.parts import Finding, part

_FACTS = {"size", "warmup", "every"}


def _inert(held: Any, method: Any) -> list[Finding]:
    if method.regime != "offline":
        return []
    return [(name, "the replay is filled with all of the data at once") for name in sorted(_FACTS)]


@part(
    "replay",
    equation="{batch} of the last {size} steps",
    inert=_inert,
    bounds={
        **dict.fromkeys(("size", "batch", "n_step", "every", "updates"), "at least 1"),
        "warmup": "at least 0",
        "gamma": "from 0 to 1",
    },
)
def uniform(
    *,
    size: int = 1_000_000,
    batch: int = 256,
    n_step: int = 1,
    gamma: float = 0.99,
    warmup: int = 100,
    every: int = 1,
    updates: int = 1,
) -> None:
    """Every remembered step is as likely as any other.

    n_step    steps whose rewards are added up before the value of what follows counts
    warmup    steps collected before anything is learned
    every     steps of each environment between updates
    updates   how many there are then; on logged data, how many make one step of the run
    """
