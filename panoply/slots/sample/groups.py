"""How experience is produced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from panoply.experience import Experience
from panoply.parts import part

if TYPE_CHECKING:
    from panoply.rollout.text import Collector


@part("sample", equation="{prompts} prompts × {group} episodes at temperature {temperature}")
def groups(
    collect: Collector,
    *,
    prompts: int = 16,
    group: int = 8,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_tokens: int | None = None,
) -> Experience:
    """Some tasks, and a group of episodes for each, from the current policy."""
    return collect.episodes(
        collect.tasks(prompts),
        group,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
    )
