"""Recipes: works that are pipelines. A recipe is a list of stages, each an ordinary run that can start from another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from panoply.errors import unknown


@dataclass(frozen=True)
class Stage:
    """One run of a recipe. `@NAME` in a setting or option stands for the folder of an earlier stage's run.

    `options` are a run's (`model`, `reference`, `steps`, …), `settings` paths of the method, the world or the run.
    """

    name: str
    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """Stages in order; all of them `rounds` times, each round going on from the last stage of the one before."""

    stages: tuple[Stage, ...]
    rounds: int = 1

    def __post_init__(self) -> None:
        known: set[str] = set()
        for stage in self.stages:
            for word in (*stage.settings.values(), *stage.options.values()):
                if isinstance(word, str) and word.startswith("@") and word[1:] not in known:
                    raise unknown("earlier stage", word[1:], known)
            known.add(stage.name)

    def but(self, stage: str, **changes: Any) -> Recipe:
        """The same recipe with another method, settings or options in one stage."""
        if stage not in [s.name for s in self.stages]:
            raise unknown("stage", stage, [s.name for s in self.stages])
        stages = tuple(dataclasses.replace(s, **changes) if s.name == stage else s for s in self.stages)
        return dataclasses.replace(self, stages=stages)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
