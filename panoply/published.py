"""Where a method's settings are from: published, inherited from the method it builds on, or chosen here.

    @method("ead@1", base="grpo", published={"arXiv 2510.05251, table 4": {"sample.group": 8, "update.lr": 2e-6}})

Each source names what it states, as paths and values; `none` states that something is absent. A path of a preset has
the preset's name before it: `control:update.lr`. The values stand here a second time on purpose: a test compares them
with what the method really does, so that neither can change alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from panoply import compose, registry
from panoply.errors import unknown
from panoply.parts import show_value
from panoply.registry import Entry

ABSENT = object()
"""What a path has for a value where there is no such setting."""


@dataclass(frozen=True)
class Origin:
    """One setting, its value, and who says so."""

    path: str
    value: Any
    kind: Literal["published", "inherited", "chosen"]
    source: str

    @property
    def says(self) -> str:
        words = {"published": f"published: {self.source}", "inherited": f"inherited from {self.source}"}
        return words.get(self.kind, "chosen here")


def statements(entry: Entry) -> Iterator[tuple[str, str | None, str, Any]]:
    """Every line of a method's table: the source, the preset or None, the path, and the value stated."""
    for source, stated in entry.published.items():
        for path, value in stated.items():
            preset, colon, rest = path.partition(":")
            if colon and preset not in entry.presets:
                raise unknown(f"preset of {entry.name}", preset, entry.presets)
            yield (source, preset, rest, value) if colon else (source, None, path, value)


def values(entry: Entry, preset: str | None = None) -> dict[str, Any]:
    """Every setting of a method, with a preset those of a run and a policy that it brings as well."""
    brought = entry.presets[preset] if preset else {}
    beside = {path: value for path, value in brought.items() if path.startswith(compose.BESIDE)}
    return {**compose.resolve(entry.id, preset=preset).method.settings(), **beside}


def contradictions(entry: Entry) -> list[str]:
    """What a method's table states and the method does not do, a sentence each."""
    found, known = [], {preset: values(entry, preset) for preset in (None, *entry.presets)}
    for source, preset, path, stated in statements(entry):
        has = known[preset].get(path, ABSENT)
        where = f"{entry.name}{f' (preset {preset})' if preset else ''}: {path}"
        if has is ABSENT and stated is not None:
            found.append(f"{where} does not exist, and {source} says {show_value(stated)}")
        elif has is not ABSENT and has != stated:
            found.append(f"{where} is {show_value(has)}, and {source} says {show_value(stated)}")
    return found


def origins(entry: Entry, preset: str | None = None) -> list[Origin]:
    """Where each setting is from, in the order of the slots; parts by name only where a source names them."""
    stated = {path: source for source, of, path, _ in statements(entry) if of == preset}
    if preset is not None:
        brought = {path for path in entry.presets[preset] if path not in stated}
        unsaid = {path: source for source, of, path, _ in statements(entry) if of is None}
        stated = {**{p: s for p, s in unsaid.items() if p not in brought}, **stated}
    mine = values(entry, preset)
    theirs = values(registry.find("method", entry.base)) if entry.base else {}
    found = []
    for path, value in mine.items():
        if path in stated:
            found.append(Origin(path, value, "published", stated[path]))
        elif is_part(path, mine):
            continue
        elif _inherited(path, mine, theirs):
            found.append(Origin(path, value, "inherited", str(entry.base)))
        else:
            found.append(Origin(path, value, "chosen", ""))
    gone = (p for p in stated if p not in mine)
    return found + [Origin(path, None, "published", stated[path]) for path in gone]


def is_part(path: str, settings: dict[str, Any]) -> bool:
    """Whether a path holds a part: in a slot of its own, among several and named so, or with settings below it."""
    named = settings[path] == path.rpartition(".")[2]
    return "." not in path or named or any(other.startswith(f"{path}.") for other in settings)


def _inherited(path: str, mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether the base has the same value, in a part of the same name."""
    around = path.rpartition(".")[0]
    return path in theirs and theirs[path] == mine[path] and theirs.get(around) == mine.get(around)
