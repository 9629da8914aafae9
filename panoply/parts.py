"""Parts: typed functions that become named, frozen, printable, comparable values.

    @part("credit", equation="A = R − mean_group(R)")
    def centred(experience: Experience, *, scale: float = 1.0) -> Tensor: ...

`centred(scale=2.0)` is then a frozen dataclass; calling it with the positional arguments runs the function.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from panoply.contracts import SLOTS as SLOTS
from panoply.contracts import TERMS, check_contract
from panoply.errors import PanoplyError, unknown
from panoply.ranges import ANY, check_range, merged, shown, within
from panoply.units import ALTERING, STREAMS, Unit

UNITS: tuple[Unit, ...] = typing.get_args(Unit)

Scores = Literal["sampled", "policy", "none"]
"""Whose log-probabilities a term is about: the distribution sampled from, the policy itself, or nobody's."""

Finding = tuple[str, str]
"""A hyper-parameter's name and the reason why it has no effect or cannot be; no name: the part as a whole."""


@dataclass(frozen=True)
class PartInfo:
    """What a part declares about itself beside its hyper-parameters."""

    slot: str
    name: str
    function: Callable[..., Any]
    equation: str | Callable[[Any], str]
    unit: Unit
    stream: str
    needs: frozenset[str] | Callable[[Any], frozenset[str]]
    idle: str | None
    state: Callable[[], dict[str, Any]] | None
    prepare: Callable[..., Any] | None
    annotate: Callable[..., Mapping[str, Any]] | None
    inert: Callable[..., Iterable[Finding]] | None
    impossible: Callable[..., Iterable[Finding]] | None
    bounds: Mapping[str, str]
    gives: frozenset[str]
    cost: Callable[..., Any] | None
    learns: tuple[str, ...] | Callable[[Any], tuple[str, ...]]
    scores: Scores
    acts: Callable[[Any, int], Part] | None
    tells: Callable[[Any, Mapping[str, Any]], Iterable[str]] | None

    @property
    def key(self) -> str:
        """Its name among the parts of its slot: `group`, or `cgpo/constrained` of one in a method's own file."""
        return key_of(self.function)

    @property
    def id(self) -> str:
        return f"{self.slot}.{self.key}"

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.function) or "").split("\n")[0]


class Part:
    """Base of all parts. Subclasses are made by `@part`, never by hand."""

    info: ClassVar[PartInfo]

    def __call__(self, *args: Any) -> Any:
        return self.filled(*args)

    @functools.cached_property
    def filled(self) -> Callable[..., Any]:
        """The part's function with its settings filled in, which they are once: what is called in every step."""
        return functools.partial(self.info.function, **self.settings())

    def __post_init__(self) -> None:
        for name, annotation in self.annotations().items():
            bound = self.info.bounds.get(name, ANY)
            value = check(f"{self.info.id}.{name}", getattr(self, name), annotation, bound)
            object.__setattr__(self, name, value)
            if isinstance(value, Part) and value.info.state is not None and value.info.slot not in TERMS:
                raise PanoplyError(
                    f"{self.info.id}.{name} cannot be {value.info.name}: a part that remembers must stand in a slot."
                )

    @classmethod
    @functools.cache
    def annotations(cls) -> dict[str, Any]:
        """Types of the hyper-parameters; those of the positional arguments may be imported for checking only."""
        function = cls.info.function
        names = [f.name for f in dataclasses.fields(typing.cast(Any, cls))]
        written = types.SimpleNamespace(__annotations__={n: function.__annotations__[n] for n in names})
        try:
            return typing.get_type_hints(written, globalns=function.__globals__)
        except Exception as error:  # whatever evaluating someone's annotation may raise
            raise PanoplyError(f"A setting of {cls.info.id} has a type that is none: {error}.") from error

    def settings(self) -> dict[str, Any]:
        """The hyper-parameters by name, as they are set in this part."""
        return {name: getattr(self, name) for name in self.annotations()}

    def but(self, **changes: Any) -> Self:
        """The same part with other hyper-parameters."""
        for name in changes:
            if name not in self.annotations():
                raise unknown(f"setting of {self.info.id}", name, self.annotations())
        return type(self)(**{**self.settings(), **changes})

    def needs(self) -> frozenset[str]:
        """What the part asks of the current forward pass (`entropy`, …) or of snapshots (`logp@reference`)."""
        needs = self.info.needs
        own = needs(self) if callable(needs) else needs
        if not isinstance(own, frozenset | set):
            raise PanoplyError(f"The needs of {self.info.id} are a set of words, not {own!r:.60}.")
        own = frozenset(own)
        return own.union(*(v.needs() for v in self.settings().values() if isinstance(v, Part)))

    def acting(self, step: int) -> Part:
        """Who acts for it in a step: itself, or of a part in phases the one whose turn it is."""
        return self if self.info.acts is None else self.info.acts(self, step)

    @functools.cached_property
    def units(self) -> frozenset[str]:
        """What a term has to see whole: its unit, and more where it needs that (`whole:group`)."""
        return frozenset({self.info.unit, *(n[6:] for n in self.needs() if n.startswith("whole:"))})

    def learns(self) -> tuple[str, ...]:
        """What a loss on transitions moves: `policy`, or networks by name."""
        moved = self.info.learns
        return moved(self) if callable(moved) else moved

    def equation(self) -> str:
        """The part's formula, with its settings filled in."""
        form = self.info.equation
        if callable(form):
            return str(form(self))
        try:
            return form.format(**{k: show_value(v) for k, v in self.settings().items()})
        except (LookupError, ValueError, AttributeError) as error:
            raise PanoplyError(
                f"The equation of {self.info.id}, '{form:.60}', cannot be filled in: {error}."
            ) from error

    def __str__(self) -> str:
        inside = ", ".join(f"{k}={show_value(v)}" for k, v in self.settings().items())
        return f"{self.info.name}({inside})"

    def to_json(self) -> dict[str, Any]:
        """The part as a file holds it: its id, and every setting. `values.part_from_json` reads it."""
        return {"part": self.info.id, **{k: value_to_json(v) for k, v in self.settings().items()}}


_PARTS: dict[str, dict[str, type[Part]]] = {slot: {} for slot in SLOTS}


def part(
    slot: str,
    *,
    equation: str | Callable[[Any], str] = "",
    unit: Unit = "decision",
    stream: str = "own",
    needs: Iterable[str] | Callable[[Any], frozenset[str]] = (),
    idle: str | None = None,
    state: Callable[[], dict[str, Any]] | None = None,
    prepare: Callable[..., Any] | None = None,
    annotate: Callable[..., Mapping[str, Any]] | None = None,
    inert: Callable[..., Iterable[Finding]] | None = None,
    impossible: Callable[..., Iterable[Finding]] | None = None,
    bounds: Mapping[str, str] | None = None,
    gives: Iterable[str] = (),
    cost: Callable[..., Any] | None = None,
    learns: tuple[str, ...] | Callable[[Any], tuple[str, ...]] = ("policy",),
    scores: Scores | None = None,
    acts: Callable[[Any, int], Part] | None = None,
    tells: Callable[[Any, Mapping[str, Any]], Iterable[str]] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Part]]:
    """Register a function as a part of `slot`.

    unit      what one value of a term belongs to, which is never cut: a decision, what shares a key (turn, segment,
              episode, parent, step, game, group, task, domain, agent), a pair, a ranked list, or the whole batch
    scores    whose log-probabilities a term gets: `sampled`, those of the distribution drawn from, which a ratio to the
              behaviour needs (surrogates and regularisers, if they say nothing); `policy`, the policy's own at
              temperature 1 and with nothing cut off, which likelihoods, pairs and regressions need (losses); or `none`
    stream    which decisions a term speaks about; each stream is normalised by its own count
    needs     outputs of the forward pass, `logp@SNAPSHOT` columns, what the world must have (`world:teacher`), what
              another part must give (`column:value`, `network:q`, `model:probe`), targets to be kept (`target:q`),
              what the policy must be (`policy:squashed`), a second batch (`aside`: see update.momentum), or more than
              its unit to be seen at once (`whole:group`)
    gives     what the part adds for others: `column:value`, `signal:wins`, `pairs`, `stream:imitation`
    bounds    the numbers a setting may be, such as `above 0`, `at least 1` or `from 0 up to 1` (see ranges.py)
    idle      a column whose zero means that the term has no gradient on that decision
    state     makes the first state of a part that remembers, a dict of JSON and tensors; the function then takes the
              state first and returns `(state, result)`. Of a term it is `prepare` that does so
    prepare   of a term, `(batch, **settings) → numbers`: detached numbers of the whole mini-batch at current weights,
              once, however it is split, at the price of one more forward pass; they are `batch.prepared[NAME]`
    annotate  of a loss on transitions, `(learned, replay, **settings) → columns` of all that is remembered, once a step
    cost      what `panoply plan` counts: of a sample or data part `(part, lengths) → tokens sampled and trained` in a
              step at most, of an update `part → numbers kept for a weight`, of a model `part → how it learns, or None`:
              an update, or WITH_POLICY where the policy's moves it; of one that is no network a number, the passes over
              a step's tokens that it asks the policy for
    learns    of a loss on transitions: what it moves, `policy`, a piece of it or networks by name
    acts      of a surrogate, `(part, step) → part`: which of the parts in its settings acts in a step; only that one's
              needs are met then
    tells     of a part that remembers, `(part, state) → sentences`: what it has found, said when a run ends
    inert, impossible   `(part, method) → (setting, reason)…`: settings without effect, or that cannot be; where it
              depends on the world, `(part, method, world) → …`
    """
    for kind, given, known in (("slot", slot, SLOTS), ("unit", unit, UNITS), ("stream", stream, STREAMS)):
        if given not in known:
            raise unknown(kind, given, known)

    for name, value, fine in (
        ("equation", equation, isinstance(equation, str) or callable(equation)),
        ("needs", needs, callable(needs) or _are_words(needs)),
        ("gives", gives, _are_words(gives)),
        ("bounds", bounds, bounds is None or (isinstance(bounds, Mapping) and _are_words(bounds.values()))),
    ):
        if not fine:
            raise PanoplyError(f"The {name} of a part in {slot} cannot be {value!r:.60}.")
    for bound in (bounds or {}).values():
        within(0, bound)
    if taken := sorted(ALTERING.keys() & {word.removeprefix("column:") for word in gives}):
        raise PanoplyError(
            f"A part in {slot} gives column:{taken[0]}, which says how a decision was drawn, of which scores are made: "
            "call its own column otherwise."
        )

    def register(function: Callable[..., Any]) -> Callable[..., Part]:
        made = _dataclass_of(slot, function)
        check_contract(slot, made.__name__, unit, function, state, prepare, annotate)
        made.info = PartInfo(
            slot, made.__name__, function, equation, unit, stream,
            needs if callable(needs) else frozenset(needs),
            idle, state, prepare, annotate, inert, impossible, dict(bounds or {}), frozenset(gives), cost, learns,
            scores or _scores(slot, unit), acts, tells,
        )  # fmt: skip
        _PARTS[slot][key_of(function)] = made
        return typing.cast(Callable[..., Part], made)

    return register


def _are_words(value: Any) -> bool:
    return (
        not isinstance(value, str)
        and isinstance(value, Collection)
        and all(isinstance(v, str) for v in value)
    )


def _scores(slot: str, unit: Unit) -> Scores:
    """Losses on transitions ask the policy themselves."""
    return "none" if unit == "transition" else "policy" if slot == "loss" else "sampled"


def _dataclass_of(slot: str, function: Callable[..., Any]) -> Any:
    """A frozen dataclass whose fields are the function's keywords."""
    name = function.__name__.rstrip("_")
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind == p.KEYWORD_ONLY]
    for p in keywords:
        if p.annotation is p.empty:
            raise PanoplyError(
                f"The setting '{p.name}' of {slot}.{name} has no type: write one after a colon."
            )
    taken = _PARTS[slot].get(key_of(function))
    if taken is not None and taken.__module__ != function.__module__:
        raise PanoplyError(
            f"'{slot}.{name}' is registered twice, by {taken.__module__} and {function.__module__}."
        )
    fields = [
        (p.name, Any) if p.default is p.empty else (p.name, Any, dataclasses.field(default=p.default))
        for p in keywords
    ]
    made: Any = dataclasses.make_dataclass(name, fields, bases=(Part,), frozen=True, repr=False)
    made.__repr__ = Part.__str__
    made.__doc__, made.__module__ = function.__doc__, function.__module__
    return made


def key_of(function: Callable[..., Any]) -> str:
    """The name of a function as a part. Those in a method's file have the method's before it, so that two works may
    each have a part `clip`; those in slots/ and in plug-ins have theirs alone."""
    name, module = function.__name__.rstrip("_"), (function.__module__ or "").split(".")
    if module[:2] != ["panoply", "methods"] or len(module) < 4:
        return name
    return f"{module[-1].replace('_plus', '+').replace('+_', '+').replace('_', '-')}/{name}"


def registered(slot: str) -> Mapping[str, type[Part]]:
    """The parts of a slot registered so far, by `PartInfo.key` (`registry.parts` finds those to be imported too)."""
    return _PARTS[slot]


def show_value(value: Any) -> str:
    """A setting as people read and type it: 0.0003, true, none."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def value_to_json(value: Any) -> Any:
    """A setting as a file holds it: a part as `to_json` writes it, a tuple as a list."""
    if isinstance(value, Part):
        return value.to_json()
    if isinstance(value, Mapping):
        return {name: value_to_json(v) for name, v in value.items()}
    return [value_to_json(v) for v in value] if isinstance(value, tuple | list) else value


# ------------------------------------------------------------------ checking values against annotations


def check(where: str, value: Any, annotation: Any, bound: str | None = None) -> Any:
    """The value, coerced where that is harmless (2 → 2.0, list → tuple) and in its range, or one clear sentence."""
    for option in options(annotation):
        good, coerced = fits(value, option)
        if good:
            if bound is not None:
                check_range(where, coerced, bound)
            return coerced
    given = shown(value) if isinstance(value, int) and not isinstance(value, bool) else repr(value)
    raise PanoplyError(f"{where} takes {describe(annotation)}, not {given[:200]}.")


def types_of(cls: Any) -> dict[str, Any]:
    """The types of a class's fields by name. Reading them compiles every annotation, so it is done once."""
    if cls not in _TYPES:
        _TYPES[cls] = typing.get_type_hints(cls)
    return _TYPES[cls]


_TYPES: dict[Any, dict[str, Any]] = {}


def check_fields(held: Any, prefix: str) -> None:
    """Check every field of a frozen dataclass against its type and the ranges that its class declares as `bounds`."""
    hints, bounds = types_of(type(held)), merged(type(held))
    for field in dataclasses.fields(held):
        where = f"{prefix}.{field.name}"
        value = check(where, getattr(held, field.name), hints[field.name], bounds.get(field.name, ANY))
        object.__setattr__(held, field.name, value)


def options(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the annotation alone."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def fits(value: Any, annotation: Any) -> tuple[bool, Any]:
    """Whether a value is what one annotation (no union) asks for, and the value, coerced where that is harmless."""
    origin = typing.get_origin(annotation)
    if annotation is Any:
        return True, value
    if annotation in (None, type(None)):
        return value is None, None
    if origin is typing.Literal:
        return value in typing.get_args(annotation), value
    if origin is tuple:
        inner = typing.get_args(annotation)
        if not isinstance(value, tuple | list):
            return False, value
        wanted = [inner[0]] * len(value) if len(inner) == 2 and inner[1] is ... else list(inner)
        pairs = [fits(v, a) for v, a in zip(value, wanted, strict=False)]
        return len(wanted) == len(value) and all(f for f, _ in pairs), tuple(v for _, v in pairs)
    if annotation is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number, _float(value) if number else value
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    return isinstance(annotation, type) and isinstance(value, annotation), value


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def describe(annotation: Any) -> str:
    """What a setting of this type takes, in words: `a number or none`."""
    named = {
        int: "a whole number",
        float: "a number",
        str: "a word",
        bool: "true or false",
        type(None): "none",
    }
    words = []
    for option in options(annotation):
        if typing.get_origin(option) is typing.Literal:
            words += [str(a) for a in typing.get_args(option)]
        elif typing.get_origin(option) is tuple:
            words.append("a list")
        else:
            words.append(named.get(option, "a part" if option is Part else str(option)))
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def kind(annotation: Any, bound: str | None) -> str:
    """What a setting takes, in words, and which numbers."""
    words = describe(annotation)
    return words if bound in (None, ANY) else f"{words}, {bound}"
