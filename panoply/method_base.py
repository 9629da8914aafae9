"""Methods: frozen values that name their parts. What all regimes share; the regimes themselves are in `regimes.py`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from panoply import selves
from panoply.errors import PanoplyError, unknown
from panoply.parts import Part, Scores, show_value


@dataclass(frozen=True)
class Method:
    """What the regimes share: slots that hold one part or several, changed with `but`, compared with `diff`."""

    regime: ClassVar[str]
    slot_of: ClassVar[dict[str, str]]
    """Which kind of part each field takes."""

    def __post_init__(self) -> None:
        for name, value in self.slots().items():
            if isinstance(value, Part) and self.several(name):
                object.__setattr__(self, name, (value,))
            several = value if isinstance(value, tuple) and self.several(name) else (value,)
            _check_twice(name, [held for held in several if isinstance(held, Part)])
            for held in several:
                if not isinstance(held, Part) or held.info.slot != self.slot_of[name]:
                    given = held.info.id if isinstance(held, Part) else repr(held)
                    raise PanoplyError(f"The slot '{name}' takes a {self.slot_of[name]} part, not {given}.")

    def slots(self) -> dict[str, Part | tuple[Part, ...]]:
        """What every slot holds; one that may be empty and is, is left out."""
        held = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in held.items() if value is not None}

    @classmethod
    def several(cls, slot: str) -> bool:
        """Whether a slot holds any number of parts."""
        return str(cls.__dataclass_fields__[slot].type).startswith("tuple")

    @classmethod
    def optional(cls, slot: str) -> bool:
        """Whether a slot may be empty."""
        return cls.several(slot) or str(cls.__dataclass_fields__[slot].type).endswith("None")

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Every part with its path: `credit`, `regularise.kl`, …"""
        for slot, value in self.slots().items():
            if isinstance(value, tuple):
                yield from ((f"{slot}.{held.info.name}", held) for held in value)
            else:
                yield slot, value

    def seated(self) -> dict[str, Method]:
        """The methods of the learners in a run of several, by name; the first is what the run is judged by."""
        return {}

    @property
    def one_model(self) -> bool:
        """Whether several learners are roles of one model."""
        return False

    @property
    def own_moments(self) -> bool:
        """Whether learners that are roles of one model have an optimiser each."""
        return False

    @property
    def turn_waits(self) -> bool:
        """Whether rows that are dealt to a seat wait for its turn, and are not lost where it does not learn."""
        return False

    @property
    def loop(self) -> str:
        """Which step function of `loops/` makes the steps of a run."""
        return self.regime

    @property
    def normalised_once(self) -> bool:
        """Whether observations are normalised by logged data, once, and not by what is seen in each step."""
        return False

    def terms(self) -> list[Part]:
        """The parts the learner differentiates."""
        raise NotImplementedError

    def equation(self) -> list[str]:
        """What is maximised or minimised, and on which data, in lines."""
        raise NotImplementedError

    def needs(self, step: int | None = None) -> frozenset[str]:
        """What all parts together ask of the forward pass, of snapshots, of the policy and of the world.

        In a run, or in a step of it, where parts act in phases.
        """
        held = (part if step is None else part.acting(step) for _, part in self.parts())
        return frozenset().union(*(part.needs() for part in held))

    @property
    def phased(self) -> bool:
        """Whether a part acts in phases, so that needs change in the course of a run."""
        return any(held.info.acts is not None for _, held in self.parts())

    def snapshots(self, scores: Scores) -> list[str]:
        """Whose log-probabilities `logp@NAME` are needed, of the distribution sampled from or of the policy itself."""
        found: set[str] = set()
        for _, held in self.parts():
            if held.info.scores == scores:
                found |= {n.removeprefix("logp@") for n in held.needs() if n.startswith("logp@")}
        return sorted(found)

    @property
    def acts_alone(self) -> bool:
        """Whether all own decisions of a step are of the policy as the step finds it."""
        return not self.actors()

    def actors(self) -> list[str]:
        """Snapshots that act, beside the policy that learns or in its place."""
        return selves.actors(self.needs())

    def but(self, **changes: Part | tuple[Part, ...]) -> Self:
        """The same method with other parts: a paper as a diff."""
        for name in changes:
            if name not in self.slot_of:
                raise unknown(f"slot of the {self.regime} regime", name, self.slot_of)
        return dataclasses.replace(self, **changes)

    def settings(self) -> dict[str, Any]:
        """Every hyper-parameter by path, parts by name: `credit`, `credit.scale`, `regularise.kl.weight`, …"""
        flat: dict[str, Any] = {}
        for path, held in self.parts():
            _flatten(path, held, flat)
        return flat

    def diff(self, other: Method) -> list[tuple[str, str | None, str | None]]:
        """Paths at which two methods differ, with both values (None where absent)."""
        mine, theirs = self.settings(), other.settings()
        paths = [p for p in {**mine, **theirs} if p not in mine or p not in theirs or mine[p] != theirs[p]]

        def shown(settings: dict[str, Any], path: str) -> str | None:
            return show_value(settings[path]) if path in settings else None

        return [(p, shown(mine, p), shown(theirs, p)) for p in paths]

    def to_json(self) -> dict[str, Any]:
        """The method as a file holds it: its regime, and the parts of each slot."""
        slots = {
            name: [held.to_json() for held in value] if isinstance(value, tuple) else value.to_json()
            for name, value in self.slots().items()
        }
        return {"regime": self.regime, **slots}

    def hash(self) -> str:
        """A short hash of everything that determines the method."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _check_twice(slot: str, several: list[Part]) -> None:
    """Parts of a slot are told apart by their own names, which paths, metrics and states have."""
    for i, held in enumerate(several):
        for other in several[:i]:
            if held.info.name == other.info.name and held.info.key != other.info.key:
                raise PanoplyError(
                    f"The slot '{slot}' has {other.info.key} and {held.info.key}, whose settings would have the same "
                    "paths: take one of them."
                )
            if held.info.name == other.info.name:
                raise PanoplyError(
                    f"The slot '{slot}' has {held.info.name} twice, which only doubles it: change its settings instead."
                )


def _flatten(path: str, held: Part, into: dict[str, Any]) -> None:
    into[path] = held.info.name
    for name, value in held.settings().items():
        if isinstance(value, Part):
            _flatten(f"{path}.{name}", value, into)
        else:
            into[f"{path}.{name}"] = value
