"""Answers sampled a window at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from panoply.costs import Lengths, Tokens
from panoply.experience import Experience
from panoply.parts import Finding, part

if TYPE_CHECKING:
    from panoply.rollout.text import Collector

OPEN_ANSWERS = "open answers"
"""What a sample part gives whose answers may go on in another step, and a credit part that can value them."""

GIVEN_TOKENS = "given tokens"
"""What a sample part gives whose answers begin with tokens that the policy does not learn from."""


def _first() -> dict[str, Any]:
    from panoply.rollout.windows import nothing_open

    return nothing_open()


def _cost(held: Any, of: Lengths) -> Tokens:
    return held.slots * min(held.window, of.answer), held.slots * (of.prompt + of.context)


def _impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    if OPEN_ANSWERS not in method.credit.info.gives:
        return [
            ("", f"{method.credit.info.id} compares whole answers, and unfinished ones have earned nothing")
        ]
    return []


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    longest = getattr(world, "max_tokens", held.window)
    return [("window", f"no answer has more than {longest} tokens")] if held.window > longest else []


@part(
    "sample",
    equation=lambda held: f"{held.slots} answers under way, {held.window} more tokens of each",
    needs={"world:verify", "world:one turn", "engine:entropy"},
    gives={OPEN_ANSWERS},
    state=_first,
    cost=_cost,
    impossible=_impossible,
    inert=_inert,
    bounds={"slots": "at least 1", "window": "at least 1", "temperature": "above 0 to 100"},
)
def windows(
    state: dict[str, Any],
    collect: Collector,
    *,
    slots: int = 128,
    window: int = 8192,
    temperature: float = 1.0,
) -> tuple[dict[str, Any], Experience]:
    """So many answers at once, of which a step samples no more than a window (T-PPO, arXiv 2506.15050).

    What is not over after it waits and goes on in the next step, under the weights there are then; in its place nobody
    waits for the longest answer. Slots of answers that are over get new tasks. Tokens of earlier windows come along,
    with the log-probabilities they were drawn with, and learn no more; open answers are part of a checkpoint.

    slots    answers under way at once
    window   tokens that a step adds to each of them at most
    """
    from panoply.rollout.windows import next_window

    return next_window(collect, state, slots, window, temperature)
