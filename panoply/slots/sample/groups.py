"""How experience is produced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from panoply.experience import Experience
from panoply.parts import Finding, Part, part, show_value
from panoply.selves import LEARNER, acts, by_whom

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


LIMITS = {
    "prompts": "at least 1",
    "group": "at least 1",
    "temperature": "from 0 to 100",
    "top_p": "above 0 to 1",
    "top_k": "at least 0",
    "min_p": "from 0 up to 1",
    "repetition_penalty": "above 0",
    "presence_penalty": "from -100 to 100",
    "frequency_penalty": "from -100 to 100",
    "max_tokens": "at least 1",
    "turns": "at least 1",
    "pool": "at least 1",
}


def greedy_groups(held: Any, method: Any) -> list[Finding]:
    """Without chance a group's episodes are all the same."""
    if held.temperature == 0 and held.group > 1:
        return [("temperature", f"all {held.group} episodes of a group would be the same")]
    return []


def _impossible(held: Any, method: Any, world: Any) -> list[Finding]:
    if isinstance(held.turns, Part) and world.medium != "text":
        return [("turns", f"an episode of {world.name} has no turns that could be counted")]
    if held.pool is not None and held.pool < held.prompts:
        small = f"a pool of {held.pool} tasks is smaller than a batch of {held.prompts} prompts"
        return [("pool", small)]
    return greedy_groups(held, method)


def _inert(held: Any, method: Any, world: Any) -> list[Finding]:
    found = greedy_cuts(held, method, world)
    inner = held.turns.settings() if isinstance(held.turns, Part) else ()
    reason = ""
    if world.medium != "text":
        reason = f"an episode of {world.name} is cut by sample.max_tokens"
    elif world.turn_cap == 1:
        reason = f"episodes of {world.name} have one turn"
    elif isinstance(held.turns, int) and held.turns >= world.turn_cap:
        reason = f"{world.name} itself ends episodes after {world.turn_cap}"
    return [*found, *((name, reason) for name in ("turns", *(f"turns.{n}" for n in inner)) if reason)]


def greedy_cuts(held: Any, method: Any, world: Any) -> list[Finding]:
    """The likeliest token is in every cut, and only text has tokens."""
    cuts = ("top_p", "top_k", "min_p")
    if world.medium != "text":
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        return [(name, f"{world.name} has no tokens to draw") for name in (*cuts, *penalties)]
    if held.temperature == 0:
        return [(name, "at temperature 0 the likeliest token is taken") for name in cuts]
    if held.top_k and held.top_k >= (known := world.tokenizer.vocab_size):
        return [("top_k", f"{world.name} has {known} tokens, all of which may be drawn")]
    return []


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} prompts × {held.group} episodes at temperature {held.temperature:g}"
        f"{'' if held.pool is None else f', of the same {held.pool}'}"
        f"{'' if held.turns is None else f', turns: {show_value(held.turns)}'}"
        f"{by_whom(held.by)}"
    ),
    needs=lambda held: acts(held.by),
    bounds=LIMITS,
    impossible=_impossible,
    inert=_inert,
)
def groups(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    max_tokens: int | None = None,
    turns: int | Part | None = None,
    pool: int | None = None,
    by: str = LEARNER,
) -> Experience:
    """Some tasks, and a group of episodes for each.

    turns: after so many an episode is cut off, a number or a schedule (`staged`); none: the world's own cap
    pool: tasks come from so many, all of them once and then all again in another order; none: no task comes again
    by: who acts, the policy that learns or another self of it (`behind:10`: see panoply/selves.py)
    """
    assert not isinstance(turns, Part), "a schedule is a number by now"
    asked: dict[str, Any] = {} if turns is None else {"turns": turns}
    with collect.acted_by(by):
        return collect.episodes(
            collect.tasks(prompts) if pool is None else collect.recurring(prompts, pool),
            group,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            max_tokens=max_tokens,
            **asked,
        )
