"""Regimes: the kinds of methods there are, a dataclass each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from panoply.errors import PanoplyError
from panoply.method_base import Method as Method
from panoply.parts import Part, show_value
from panoply.units import plural

if TYPE_CHECKING:
    from panoply.replay import Rhythm


def _weighted(terms: tuple[Part, ...]) -> str:
    """` − 0.04·KL(…)` for each term with a weight other than zero."""
    shown = [(show_value(t.settings().get("weight", 1.0)), t.equation()) for t in terms]
    return "".join(f" − {w}·{e}" for w, e in shown if w != "0")


@dataclass(frozen=True)
class OnPolicy(Method):
    """Collect, assign credit, ascend a surrogate for some epochs, forget."""

    sample: Part
    reward: Part
    credit: Part
    surrogate: Part
    reduce: Part
    update: Part
    select: tuple[Part, ...] = ()
    regularise: tuple[Part, ...] = ()
    models: tuple[Part, ...] = ()
    replay: Part | None = None

    regime: ClassVar[str] = "on_policy"
    slot_of: ClassVar[dict[str, str]] = {
        **{
            s: s
            for s in ("sample", "reward", "select", "credit", "surrogate", "regularise", "reduce", "update")
        },
        "models": "model",
        "replay": "replay",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if "steps" in self.sample.info.gives:
            raise PanoplyError(
                f"An on-policy method learns from whole batches; sample.{self.sample.info.name} gives one step after "
                "another. Take sample=rollout."
            )
        if self.replay is not None and self.replay.info.unit != "episode":
            raise PanoplyError(
                f"An on-policy method learns again from whole episodes, and replay.{self.replay.info.name} keeps "
                "single steps. Take replay=episodes."
            )

    @property
    def acts_alone(self) -> bool:
        alone = super().acts_alone and not {"dealt", "delayed", "recorded"} & self.sample.info.gives
        return alone and self.replay is None and not self.looks_back

    @property
    def looks_back(self) -> bool:
        """Whether the batch of the step before is learned from again, in a stage of its own."""
        return any("column:stage" in held.info.gives for held in self.select)

    def terms(self) -> list[Part]:
        return [self.surrogate, *self.regularise]

    def equation(self) -> list[str]:
        unit = self.surrogate.info.unit
        average = self.reduce.equation() if unit == "decision" else f"mean over {plural(unit)}"
        again = [f"          {self.replay.equation()}"] if self.replay is not None else []
        return [
            f"maximise  {average} [ {self.surrogate.equation()}{_weighted(self.regularise)} ]",
            f"with      {self.credit.equation()}",
            f"          R = {self.reward.equation()}",
            *again,
        ]


@dataclass(frozen=True)
class Dataset(Method):
    """Descend losses on given data: imitation, preferences, reward models."""

    data: Part
    losses: tuple[Part, ...]
    reduce: Part
    update: Part
    models: tuple[Part, ...] = ()

    regime: ClassVar[str] = "dataset"
    slot_of: ClassVar[dict[str, str]] = {
        "data": "data",
        "losses": "loss",
        "reduce": "reduce",
        "update": "update",
        "models": "model",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.losses:
            raise PanoplyError("A dataset method needs at least one loss.")
        for loss in self.losses:
            if loss.info.unit == "transition":
                raise PanoplyError(f"{loss.info.id} is a loss on transitions; a dataset method has none.")

    def terms(self) -> list[Part]:
        return list(self.losses)

    def equation(self) -> list[str]:
        first, *rest = self.losses
        unit = first.info.unit
        average = self.reduce.equation() if unit == "decision" else f"mean over {plural(unit)}"
        more = "".join(f" + {show_value(t.settings().get('weight', 1.0))}·{t.equation()}" for t in rest)
        return [f"minimise  {average} [ {first.equation()}{more} ]", f"on        {self.data.equation()}"]


@dataclass(frozen=True)
class OffPolicy(Method):
    """Act step by step into a replay, and after each step descend losses on what is drawn from it.

    With `data` the replay has logged experience beside its own.
    """

    sample: Part
    replay: Part
    losses: tuple[Part, ...]
    targets: Part
    update: Part
    networks: tuple[Part, ...] = ()
    data: Part | None = None

    regime: ClassVar[str] = "off_policy"
    slot_of: ClassVar[dict[str, str]] = {
        "sample": "sample",
        "data": "data",
        "replay": "replay",
        "losses": "loss",
        "targets": "targets",
        "update": "update",
        "networks": "network",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_transitions(self, self.losses)
        _check_steps(self.sample)
        if self.data is not None:
            _check_mixed(self.data, self.losses)

    @property
    def normalised_once(self) -> bool:
        return self.data is not None

    def rhythm(self, steps: int) -> Rhythm:
        """When a run of so many steps learns: with logged data from the first step on, else after a warm-up."""
        from panoply.replay import Rhythm

        replay, acting = self.replay.settings(), self.sample.settings()
        updates, every = replay["updates"], replay["every"]
        alone = self.data.settings()["alone"] or 0 if self.data is not None else 0
        first = replay["warmup"] // acting["envs"] + 1 if self.data is None else 1
        return Rhythm(alone, acting["length"] // every * updates, updates, every, first)

    def terms(self) -> list[Part]:
        return list(self.losses)

    def equation(self) -> list[str]:
        return _transition_equation(self)


@dataclass(frozen=True)
class Offline(Method):
    """The same losses on a replay that is filled with logged data; with `sample` it goes on with its own experience."""

    data: Part
    replay: Part
    losses: tuple[Part, ...]
    targets: Part
    update: Part
    networks: tuple[Part, ...] = ()
    sample: Part | None = None

    regime: ClassVar[str] = "offline"
    slot_of: ClassVar[dict[str, str]] = {
        "data": "data",
        "sample": "sample",
        "replay": "replay",
        "losses": "loss",
        "targets": "targets",
        "update": "update",
        "networks": "network",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_transitions(self, self.losses)
        if self.sample is not None:
            _check_steps(self.sample)
            _check_mixed(self.data, self.losses)

    @property
    def loop(self) -> str:
        return "dataset" if self.sample is None else "off_policy"

    @property
    def normalised_once(self) -> bool:
        return True

    def rhythm(self, steps: int) -> Rhythm:
        """When a run of so many steps learns: as often while acting as without, and half of it without, unless said."""
        from panoply.replay import Rhythm

        updates, said = self.replay.settings()["updates"], self.data.settings().get("alone")
        alone = steps // 2 if said is None else said
        length = self.sample.settings()["length"] if self.sample is not None else 1
        return Rhythm(alone, updates, updates, length, spread=True)

    def terms(self) -> list[Part]:
        return list(self.losses)

    def equation(self) -> list[str]:
        return _transition_equation(self)


def _check_transitions(method: OffPolicy | Offline, losses: tuple[Part, ...]) -> None:
    """Losses of these regimes see what came after a decision, and networks; others do not."""
    if method.replay.info.unit == "episode":
        raise PanoplyError(
            f"Losses on transitions draw single steps, and replay.{method.replay.info.name} keeps whole episodes. "
            "Take replay=uniform."
        )
    if not losses:
        raise PanoplyError(f"An {method.regime.replace('_', '-')} method needs at least one loss.")
    for loss in losses:
        if loss.info.unit != "transition":
            raise PanoplyError(
                f"{loss.info.id} is a loss on {plural(loss.info.unit)}; this regime takes losses on transitions."
            )


def _check_steps(sample: Part) -> None:
    if "steps" not in sample.info.gives:
        raise PanoplyError(
            f"An off-policy method learns after every step; sample.{sample.info.name} gives whole batches. "
            "Take sample=explore."
        )


def _check_mixed(data: Part, losses: tuple[Part, ...]) -> None:
    """Logged data and own experience side by side are drawn from row by row."""
    if "alone" not in data.settings():
        raise PanoplyError(f"data.{data.info.name} cannot be mixed with own experience. Take data=logged.")
    for loss in losses:
        if loss.info.annotate is not None:
            raise PanoplyError(
                f"{loss.info.id} is computed over whole logged episodes, so there can be no own experience beside "
                "them: leave sample out."
            )


def _transition_equation(method: OffPolicy | Offline) -> list[str]:
    lines = [f"{' and '.join(loss.learns())}: {loss.equation()}" for loss in method.losses]
    sources = [held.equation() for held in (method.data, method.sample) if held is not None]
    on = f"{method.replay.equation()}, from {' and then '.join(sources)}"
    return [f"minimise  {lines[0]}", *(f"          {line}" for line in lines[1:]), f"on        {on}"]


@dataclass(frozen=True)
class Several(Method):
    """Several learners in one run, each with a method of its own. The run is judged by the first, and its model is its.

    seats   names and methods; settings are `NAME.PATH`, such as `solver.credit.scale`
    turn    who learns in a step
    game    what all of them do together in a step, from which each gets rows (its own `sample` is then `dealt`);
            none: every seat that learns collects for itself
    share   whether all seats are roles of one model: the same weights, moved by one optimiser
    apart   whether they have an optimiser each, with moments of its own, that moves the weights they share
    """

    seats: tuple[tuple[str, Method], ...]
    turn: Part
    game: Part | None = None
    share: bool = False
    apart: bool = False

    regime: ClassVar[str] = "several"
    slot_of: ClassVar[dict[str, str]] = {"turn": "turn", "game": "game"}

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [name for name, _ in self.seats]
        if len(names) < 2 or len(set(names)) < len(names):
            raise PanoplyError("A method of several learners has two seats at least, with different names.")
        if self.apart and not self.share:
            raise PanoplyError(
                "Learners that share no weights have an optimiser each anyway: leave out apart."
            )
        for name, held in self.seats:
            if not name.isidentifier() or name in (*self.slot_of, "world", "policy", "run"):
                raise PanoplyError(f"A seat cannot be called '{name}'.")
            if not hasattr(held, "seated") or held.seated():
                raise PanoplyError(f"The seat '{name}' takes a method of one learner.")
            dealt = any("dealt" in part.info.gives for _, part in held.parts())
            if dealt != (self.game is not None):
                why = (
                    "there is no game: take another" if dealt else "a game deals out rows: take sample=dealt"
                )
                raise PanoplyError(f"The seat '{name}' cannot have that sample part, for {why}.")

    @property
    def one_model(self) -> bool:
        return self.share

    @property
    def own_moments(self) -> bool:
        return self.apart

    @property
    def turn_waits(self) -> bool:
        return "waiting" in self.turn.info.gives

    def seated(self) -> dict[str, Method]:
        return dict(self.seats)

    def slots(self) -> dict[str, Part | tuple[Part, ...]]:
        return {"turn": self.turn, **({"game": self.game} if self.game is not None else {})}

    def parts(self) -> Iterator[tuple[str, Part]]:
        yield from super().parts()
        for name, held in self.seats:
            yield from ((f"{name}.{path}", part) for path, part in held.parts())

    def with_seat(self, name: str, method: Method) -> Self:
        """The same with another method for one seat."""
        return dataclasses.replace(self, seats=tuple((n, method if n == name else m) for n, m in self.seats))

    def terms(self) -> list[Part]:
        return [term for _, held in self.seats for term in held.terms()]

    def equation(self) -> list[str]:
        own = [f"turn      {self.turn.equation()}"]
        own += [f"game      {self.game.equation()}"] if self.game is not None else []
        each = ", an optimiser each" if self.apart else ""
        own += [f"weights   one model for all{each}"] if self.share else []
        return [*(line for name, held in self.seats for line in (f"{name}:", *held.equation())), *own]

    def to_json(self) -> dict[str, Any]:
        share = {name: True for name in ("share", "apart") if getattr(self, name)}
        return {**super().to_json(), **share, "seats": [[name, held.to_json()] for name, held in self.seats]}


@dataclass(frozen=True)
class Fit(Method):
    """How a model beside the policy learns from the experience it gets to see."""

    losses: tuple[Part, ...]
    reduce: Part
    update: Part

    regime: ClassVar[str] = "fit"
    slot_of: ClassVar[dict[str, str]] = {"losses": "loss", "reduce": "reduce", "update": "update"}

    def terms(self) -> list[Part]:
        return list(self.losses)


@dataclass(frozen=True)
class Make(Method):
    """Nothing is trained: a part makes data of what earlier stages of a recipe left."""

    make: Part

    regime: ClassVar[str] = "make"
    slot_of: ClassVar[dict[str, str]] = {"make": "make"}

    def terms(self) -> list[Part]:
        return []

    def equation(self) -> list[str]:
        return [f"makes     {self.make.equation()}"]


REGIMES: dict[str, type[Method]] = {
    "on_policy": OnPolicy,
    "off_policy": OffPolicy,
    "dataset": Dataset,
    "offline": Offline,
    "make": Make,
    "several": Several,
}
