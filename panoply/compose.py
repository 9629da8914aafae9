"""Resolving a method: its published defaults, a preset, borrowed slots, and settings by path."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from panoply import registry
from panoply.elsewhere import meant
from panoply.errors import PanoplyError, unknown
from panoply.parts import Part, check
from panoply.ranges import ANY, check_range
from panoply.regimes import REGIMES, Method, Several
from panoply.values import parse, value_from_json

Filling = str | Part | Sequence[Part] | None
"""What fills a slot: a name, a part, several parts, or nothing."""
Presets = str | tuple[str, ...] | None
"""A preset, or several of which the first that a method has is meant."""
BESIDE = ("run.", "policy.")
"""Settings of a preset that are not the method's, but of the run and the policy beside it."""


@dataclass(frozen=True)
class Resolved:
    """A method and which of its settings the user chose."""

    id: str
    method: Method
    chosen: frozenset[str] = field(default_factory=frozenset)


def resolve(
    name: str,
    *,
    preset: Presets = None,
    slots: Mapping[str, Filling] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Resolved:
    """Build `name`, then apply its preset (if it has one of that name), borrowed slots and settings, in that order."""
    entry = registry.find("method", name)
    method: Method = entry.build()
    for path, value in preset_of(entry, preset).items():
        method = method if path.startswith(BESIDE) else assign(method, path, value)
    chosen = set(slots or {})
    for slot, source in (slots or {}).items():
        before = method.settings()
        method = borrow(method, slot, source, preset)
        if not isinstance(source, str):
            chosen |= _set_in(method, slot, before)
    for path, value in (settings or {}).items():
        method = assign(method, path, value)
        chosen.add(path)
    return Resolved(entry.id, method, frozenset(chosen))


def fitting(method: Method, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those settings that a method has and whose values it takes, a part that one of them chooses included.

    Settings of a run or policy stay.
    """
    found = {}
    for path, value in settings.items():
        if path.startswith(BESIDE):
            found[path] = value
        elif path in method.settings():
            try:
                method = assign(method, path, value)
            except PanoplyError:  # its part has another kind of value under that name
                continue
            found[path] = value
    return found


def preset_of(entry: registry.Entry, names: Presets) -> Mapping[str, Any]:
    """The settings of the first of these presets that a method has."""
    wanted = (names,) if isinstance(names, str) else names or ()
    presets = entry.presets if wanted else {}
    return next((presets[name] for name in wanted if name in presets), {})


def _set_in(method: Method, slot: str, before: Mapping[str, Any]) -> set[str]:
    """Which settings of the parts in a slot were set by whoever made them: neither the parts' own nor there before."""
    plain: dict[str, Any] = {}
    for path, held in method.parts():
        if path.split(".")[0] == slot:
            fields = dataclasses.fields(held)  # type: ignore[arg-type]
            plain |= {f"{path}.{f.name}": f.default for f in fields}
    now = method.settings()
    return {
        path for path, value in plain.items() if path in now and now[path] not in (value, before.get(path))
    }


def borrow(method: Method, slot: str, source: Filling, preset: Presets = None) -> Method:
    """Fill a slot with a part of that name, with what another method has in that slot, or with parts as they are."""
    if slot not in method.slot_of:
        raise unknown(f"slot of the {method.regime} regime", slot, method.slot_of)
    if source is None or (isinstance(source, list | tuple) and not source):
        if not method.optional(slot):
            raise PanoplyError(f"The slot '{slot}' cannot be empty.")
        return dataclasses.replace(method, **{slot: () if method.several(slot) else None})
    if isinstance(source, Part):
        return method.but(**{slot: source})
    if not isinstance(source, str):
        return method.but(**{slot: tuple(source)})
    kind = method.slot_of[slot]
    known = registry.parts(kind)
    methods = registry.names("method") if source not in known else set()
    if source in known:
        return method.but(**{slot: known[source]()})
    if source.split("@")[0] not in methods:
        raise unknown(f"{slot} part or method", source, {*known, *methods})
    lender = resolve(source, preset=preset).method
    if slot not in lender.slot_of:
        raise PanoplyError(
            f"'{source}' has no slot '{slot}': it is a {lender.regime} method, with {', '.join(lender.slot_of)}."
        )
    if slot not in lender.slots():
        raise PanoplyError(f"'{source}' has nothing in its slot '{slot}'.")
    return method.but(**{slot: lender.slots()[slot]})


def assign(method: Method, path: str, value: Any) -> Method:
    """Set one path: `credit.scale`, `update.schedule.warmup`, `regularise.kl` (its weight; `none` removes it)."""
    slot, _, rest = path.partition(".")
    if rest and (seated := method.seated().get(slot)) is not None:
        return cast(Several, method).with_seat(slot, assign(seated, rest, value))
    if slot not in method.slot_of:
        near = meant(method, path)
        kind = "setting" if near else f"slot of the {method.regime} regime"
        raise unknown(kind, path if near else slot, method.slot_of, near)
    held = method.slots().get(slot)
    if not rest:
        if method.optional(slot) and str(value).lower() == "none":
            return dataclasses.replace(method, **{slot: () if method.several(slot) else None})
        value = value_from_json(value)
        return borrow(method, slot, value if isinstance(value, Part | tuple) else str(value))
    if held is None:
        raise PanoplyError(
            f"The slot '{slot}' is empty, so there is no {path}: fill it first, as in --{slot} NAME."
        )
    if isinstance(held, tuple):
        return method.but(**{slot: _assign_several(method, slot, held, rest, value)})
    if rest.partition(".")[0] not in held.annotations():
        raise unknown(f"setting of {slot} ({held.info.name})", rest, held.annotations(), meant(method, path))
    return method.but(**{slot: _assign_part(slot, held, rest, value)})


def _assign_several(
    method: Method, slot: str, held: tuple[Part, ...], rest: str, value: Any
) -> tuple[Part, ...]:
    """Settings of a slot that holds any number of parts: naming one that is absent adds it."""
    name, _, setting = rest.partition(".")
    kind = method.slot_of[slot]
    if name not in registry.parts(kind):
        raise unknown(f"{kind} part", name, registry.parts(kind), meant(method, f"{slot}.{rest}"))
    cls = registry.find_part(kind, name)
    present = next((p for p in held if p.info.id == cls.info.id), None)
    others = tuple(p for p in held if p is not present)
    word = str(value).lower()
    if not setting and word in ("none", "false"):
        return others
    made = present or cls()
    if setting:
        made = _assign_part(f"{slot}.{name}", made, setting, value)
    elif word != "true":
        if "weight" not in cls.annotations():
            raise PanoplyError(
                f"{slot}.{name} has no weight: set it to true or false, or set {slot}.{name}.SETTING."
            )
        made = _assign_part(f"{slot}.{name}", made, "weight", value)
    return tuple(made if p is present else p for p in held) if present else (*others, made)


def _assign_part(where: str, held: Part, path: str, value: Any) -> Part:
    name, _, rest = path.partition(".")
    if name not in held.annotations():
        raise unknown(f"setting of {where} ({held.info.name})", name, held.annotations())
    inner = getattr(held, name)
    if rest:
        if not isinstance(inner, Part):
            raise PanoplyError(f"{where}.{name} is {inner!r}, not a part: it has no setting '{rest}'.")
        return held.but(**{name: _assign_part(f"{where}.{name}", inner, rest, value)})
    annotation, here = held.annotations()[name], f"{where}.{name}"
    if isinstance(value, str):
        chosen = parse(here, value, annotation)
    else:
        chosen = check(here, value_from_json(value), annotation)
    check_range(here, chosen, held.info.bounds.get(name, ANY))
    return held.but(**{name: chosen})


def method_from_json(data: Mapping[str, Any]) -> Method:
    """The inverse of `Method.to_json`."""
    slots = dict(data)
    regime = slots.pop("regime", None)
    if regime not in REGIMES:
        raise unknown("regime", str(regime), REGIMES)
    seats = slots.pop("seats", None) if regime == Several.regime else None
    how: dict[str, Any] = {
        name: bool(slots.pop(name)) for name in ("share", "apart") if seats is not None and name in slots
    }
    for name in slots:
        if name not in REGIMES[regime].slot_of:
            raise unknown(f"slot of the {regime} regime", name, REGIMES[regime].slot_of)
    missing = [s for s in REGIMES[regime].slot_of if s not in slots and not REGIMES[regime].optional(s)]
    if missing:
        raise PanoplyError(f"A method of the {regime} regime has a slot '{missing[0]}', and none is given.")
    held = {name: value_from_json(value) for name, value in slots.items()}
    if seats is not None:
        held["seats"] = tuple((name, method_from_json(of)) for name, of in seats)
        held |= how
    return REGIMES[regime](**held)
