"""Recipes: works that are pipelines. A recipe is a list of stages, each an ordinary run that can start from another.

    Recipe(
        (
            Stage("solved", make=solved_by(policy="@last", answers=8)),
            Stage("imitate", "sft", {"data": "stored", "data.folder": "@solved"}, again={"model": "start"}),
        ),
        rounds=5,
        until="success>0.9",
    )

`@NAME` stands for what the stage NAME left when it was carried out last: its data, or its last weights (not its best
ones, which may be those it began with), and `@last` for the latest stage that has trained. In the first round, before
any has, a setting `@last` is passed over, and the default holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from panoply.errors import PanoplyError, unknown
from panoply.parts import Part, value_to_json
from panoply.until import Until

LAST = "@last"
TAKEN = ("last", "recipe", "run", "world")
"""What a stage cannot be called, since it means something else in a setting."""


@dataclass(frozen=True)
class Stage:
    """One stage of a recipe: a run of a method, or data that a part makes of what earlier stages left.

    `options` are a run's (`model`, `reference`, `steps`, `until`, …), `settings` paths of the method, the world or the
    run. From the second round on what `again` says replaces them, and there stages that come later may be named too.
    """

    name: str
    method: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    make: Part | None = None
    again: Mapping[str, Any] = field(default_factory=dict)

    def in_round(self, number: int) -> Stage:
        """The stage as it is in the round `number`, the first being 1."""
        if number == 1 or not self.again:
            return self
        if self.make is not None:
            return dataclasses.replace(self, make=self.make.but(**self.again))
        paths = {k: v for k, v in self.again.items() if "." in k or k in self.settings}
        words = {k: v for k, v in self.again.items() if k not in paths}
        return dataclasses.replace(
            self, settings={**self.settings, **paths}, options={**self.options, **words}
        )

    @property
    def does(self) -> str:
        """The method it trains, or what makes its data."""
        return self.method or f"{self.make} makes data"

    def choices(self) -> dict[str, Any]:
        """Options and settings of the first round."""
        return {**self.options, **self.settings}

    def named(self) -> Iterator[str]:
        """The stages that this one starts from."""
        held = self.make.settings().values() if self.make else ()
        for word in (*self.settings.values(), *self.options.values(), *held):
            if is_stage(word):
                yield word[1:]


@dataclass(frozen=True)
class Turn:
    """A stage in its round, and its place in the order in which all of them are carried out."""

    stage: Stage
    round: int
    number: int

    @property
    def folder(self) -> str:
        return f"{self.number:02d}-{self.stage.name}"


@dataclass(frozen=True)
class Recipe:
    """Stages in order; all of them `rounds` times, each round going on from the last stage of the one before.

    So from the second round on the first stage that trains starts from `@last`, unless its `again` names another model.
    After every round `until` is looked at: once the last run has reached it, no more rounds follow.
    """

    stages: tuple[Stage, ...]
    rounds: int = 1
    until: str | None = None

    def __post_init__(self) -> None:
        if not any(stage.method for stage in self.stages):
            raise PanoplyError("A recipe needs a stage that trains: name a method in one of them.")
        if isinstance(self.rounds, bool) or not isinstance(self.rounds, int) or not 1 <= self.rounds <= 1000:
            raise PanoplyError(f"A recipe has from 1 to 1000 rounds, not {self.rounds!r:.20}.")
        if self.until is not None:
            Until.parse(self.until)
            if self.rounds == 1:
                raise PanoplyError(
                    "A recipe of one round cannot end early: leave until out, or give more rounds."
                )
        earlier: list[str] = []
        for stage in self.stages:
            self._check(stage, earlier)
            earlier.append(stage.name)

    def _check(self, stage: Stage, earlier: list[str]) -> None:
        name, every = stage.name, [s.name for s in self.stages]
        if name in (*TAKEN, *earlier) or not name or not name.replace("-", "_").isidentifier():
            raise PanoplyError(f"A stage needs a name of its own, in letters and digits, not '{name}'.")
        if bool(stage.method) == (stage.make is not None):
            raise PanoplyError(f"Stage '{name}' either trains a method or makes data: give one of the two.")
        if stage.make is not None:
            if stage.make.info.slot != "make":
                raise PanoplyError(
                    f"Stage '{name}' is made by a part of the slot make, not {stage.make.info.id}."
                )
            if stage.settings or stage.options:
                raise PanoplyError(
                    f"Stage '{name}' makes data: its settings are those of {stage.make.info.id}."
                )
        if stage.again and self.rounds == 1:
            raise PanoplyError(f"Stage '{name}': again has no effect in a recipe of one round.")
        for word in stage.named():
            if word in every and word not in earlier:
                rest = "" if self.rounds == 1 else ", or name it under again, for the rounds after the first"
                raise PanoplyError(
                    f"Stage '{name}' starts from '{word}', which is not an earlier stage: change their order{rest}."
                )
            if word not in (*earlier, LAST[1:]):
                raise unknown("earlier stage", word, earlier)
        made = [f"@{s.name}" for s in self.stages if s.make is not None]
        for option in ("model", "reference"):
            for turn in (1, 2):
                if (start := str(stage.in_round(turn).options.get(option))) in made:
                    raise PanoplyError(
                        f"Stage '{name}' starts from '{start[1:]}', which makes data and no model."
                    )
        for word in stage.in_round(2).named():
            if word not in (*every, LAST[1:]):
                raise unknown("stage", word, every)

    def turns(self) -> Iterator[Turn]:
        """Every stage of every round, as it is in that round."""
        number = 0
        first = next(s.name for s in self.stages if s.method)
        for turn in range(1, self.rounds + 1):
            for stage in self.stages:
                number += 1
                if turn > 1 and stage.name == first and "model" not in stage.again:
                    stage = dataclasses.replace(stage, again={**stage.again, "model": LAST})
                yield Turn(stage.in_round(turn), turn, number)

    def to_json(self) -> dict[str, Any]:
        stages = [
            {f.name: value_to_json(getattr(s, f.name)) for f in dataclasses.fields(s)} for s in self.stages
        ]
        return {"stages": stages, "rounds": self.rounds, "until": self.until}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], part: Callable[[Mapping[str, Any]], Part]) -> Recipe:
        """The inverse of `to_json`; `part` turns the JSON of a part into the part."""
        stages = [{**s, "make": part(s["make"]) if s["make"] else None} for s in data["stages"]]
        return cls(tuple(Stage(**s) for s in stages), data["rounds"], data["until"])

    def but(
        self, stage: str = "", *, rounds: int | None = None, until: str | None = None, **changes: Any
    ) -> Recipe:
        """The same recipe with another method, settings or options in one stage, or with other rounds.

        Of one round, nothing is left that speaks about later ones.
        """
        names = [s.name for s in self.stages]
        if changes and stage not in names:
            raise unknown("stage", stage, names)
        stages = tuple(dataclasses.replace(s, **changes) if s.name == stage else s for s in self.stages)
        if rounds == 1:
            return Recipe(tuple(dataclasses.replace(s, again={}) for s in stages), 1, until)
        return Recipe(stages, self.rounds if rounds is None else rounds, until or self.until)


def is_stage(word: Any) -> bool:
    return isinstance(word, str) and word.startswith("@")
