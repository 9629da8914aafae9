"""How experience is produced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from panoply.experience import Experience
from panoply.parts import Finding, part
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
}


def greedy_groups(held: Any, method: Any) -> list[Finding]:
    """Without chance a group's episodes are all the same."""
    if held.temperature == 0 and held.group > 1:
        return [("temperature", f"all {held.group} episodes of a group would be the same")]
    return []


def greedy_cuts(held: Any, method: Any, world: Any) -> list[Finding]:
    """The likeliest token is in every cut, and only text has tokens."""
    cuts = ("top_p", "top_k", "min_p")
    if world.medium != "text":
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        return [(name, f"{world.name} has no tokens to draw") for name in (*cuts, *penalties)]
    if held.temperature != 0:
        return []
    return [(name, "at temperature 0 the likeliest token is taken") for name in cuts]


@part(
    "sample",
    equation=lambda held: (
        f"{held.prompts} prompts × {held.group} episodes at temperature {held.temperature:g}"
        f"{by_whom(held.by)}"
    ),
    needs=lambda held: acts(held.by),
    bounds=LIMITS,
    impossible=greedy_groups,
    inert=greedy_cuts,
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
    by: str = LEARNER,
) -> Experience:
    """Some tasks, and a group of episodes for each.

    by: who acts, the policy that learns or another self of it (`behind:10`: see panoply/selves.py)
    """
    with collect.acted_by(by):
        return collect.episodes(
            collect.tasks(prompts),
            group,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            max_tokens=max_tokens,
        )
