"""What is remembered, and how it is drawn again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from panoply.parts import Finding, part

if TYPE_CHECKING:
    from panoply.policies.control import ControlPolicy
    from panoply.replay import Memory

CHUNK = "replay:chunk"
"""The need of a loss that looks at more than one step."""


def _inert(held: Any, method: Any) -> list[Finding]:
    acts, given = "sample" in method.slots(), "data" in method.slots()
    found = [] if acts and given else [("logged", "all of the replay comes from one place")]
    if not acts:
        once = "the replay is filled with all of the data at once"
        found += [(name, once) for name in ("every", "size", "warmup")]
    elif method.regime == "offline":
        found += [("every", "the updates of a step are spread evenly over what is collected in it")]
    if acts and given:
        found.append(("warmup", "there is logged data to learn from at once"))
    if CHUNK not in method.needs():
        found.append(("chunk", "no loss of this method looks at several steps in a row"))
    return found


def _impossible(held: Any, method: Any) -> list[Finding]:
    wanted = held.chunk == 1 and CHUNK in method.needs()
    return [("chunk", "a loss of this method looks at several steps in a row")] if wanted else []


@part(
    "replay",
    equation="{batch} of the last {size} steps",
    needs=lambda held: frozenset({"world:demonstrations"} if held.experts else ()),
    inert=_inert,
    impossible=_impossible,
    bounds={
        **dict.fromkeys(("size", "batch", "n_step", "chunk", "every", "updates"), "at least 1"),
        "warmup": "at least 0",
        "gamma": "from 0 to 1",
        "scale": "above 0",
        "logged": "from 0 to 1",
        "experts": "from 0 to 1",
    },
)
def uniform(
    policy: ControlPolicy,
    _seed: int,
    *,
    size: int = 1_000_000,
    batch: int = 256,
    n_step: int = 1,
    chunk: int = 1,
    gamma: float = 0.99,
    warmup: int = 100,
    every: int = 1,
    updates: int = 1,
    scale: float = 1.0,
    logged: float | None = None,
    experts: float = 0.0,
) -> Memory:
    """Every remembered step is as likely as any other.

    n_step    steps whose rewards are added up before the value of what follows counts
    chunk     steps in a row that each draw brings, never over an episode's end, for losses that look at them
    warmup    steps collected before anything is learned
    every     steps of each environment between updates
    updates   how many there are then; on logged data, how many make one step of the run
    scale     what rewards are multiplied by
    logged    share of every batch that is logged data, where there is own experience beside it; none: every row of
              both is as likely as any other
    experts   share of every batch that is drawn from an expert's steps, where the data says which those are
    """
    from panoply.replay import Replay, Uniform

    def empty(room: int, envs: int) -> Replay:
        return Replay(
            policy.observation, policy.action, policy.head, size=room, envs=envs, steps=n_step, chunk=chunk,
            gamma=gamma, scale=scale, device=policy.device,
        )  # fmt: skip

    return Uniform(empty, size, logged, experts)
