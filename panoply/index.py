"""The index of what is built in: where each work and each part is defined, and a line about it.

`python -m panoply.index` writes `index.json` from the registry; a test compares the two. By it a name leads to the one
module that defines it, and `panoply list` says what there is without importing any of it. A work that is not in the
index yet is still found by its name: then everything is imported to look for it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from panoply.errors import PanoplyError
from panoply.files import read_json

FILE = Path(__file__).with_name("index.json")
Kind = Literal["method", "recipe", "world", "algorithm", "system", "protocol", "survey"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Listed:
    """What is known of a work without importing it."""

    id: str
    kind: Kind
    module: str
    summary: str
    family: str | None = None
    base: str | None = None
    world: str | None = None
    paper: int | None = None
    tags: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    """What a method asks of the forward pass, of snapshots and of the world: `entropy`, `logp@old`, `world:teacher`."""
    claimed: bool = False
    """Whether it has a claim that can be measured."""

    @property
    def name(self) -> str:
        return self.id.split("@")[0]

    @property
    def arxiv(self) -> str | None:
        """The number of its paper there, which tells apart what has the same letters."""
        found = re.search(r"arXiv (\d{4}\.\d{4,5})", self.summary)
        return found[1] if found else None

    def facts(self) -> dict[str, Any]:
        """Everything but where it is defined."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name != "module"}
        return {**fields, "arxiv": self.arxiv}

    def mentions(self, text: str) -> bool:
        """Whether every word of a text occurs in what is listed, in upper or lower case."""
        said = json.dumps(list(self.facts().values()), ensure_ascii=False).lower()
        return all(word in said for word in text.lower().split())

    def asks(self, need: str) -> bool:
        """Whether it needs something, named in full (`world:teacher`) or by its last word (`teacher`)."""
        return need in self.needs or need in (re.split("[:@]", known)[-1] for known in self.needs)


class Place(NamedTuple):
    """Where a part is defined, and what it does."""

    module: str
    summary: str


@functools.cache
def works() -> Mapping[str, Listed]:
    """The built-in works by id."""
    return {id: _listed(id, of) for id, of in _read()["works"].items() if id}


def _listed(id: str, of: Mapping[str, Any]) -> Listed:
    given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in of.items()}
    return Listed(id, **given)


@functools.cache
def parts() -> Mapping[str, Mapping[str, Place]]:
    """The built-in parts by slot and name."""
    found: dict[str, dict[str, Place]] = {}
    for id, place in _read()["parts"].items():
        slot, _, name = id.partition(".")
        if id:
            found.setdefault(slot, {})[name] = Place(*place)
    return found


def _read() -> dict[str, Any]:
    return read_json(FILE, dict[str, Any]) if FILE.is_file() else {"works": {}, "parts": {}}


def made() -> str:
    """The index as it should be, a line for each work and part."""
    from panoply import parts as part_module
    from panoply import registry, tags

    registry.import_all()
    every = [e.listed() for e in registry.registered() if e.build.__module__.startswith("panoply.")]
    for line in every:
        if line.kind in ("method", "recipe") and (lacks := tags.unanswered(line.id, line.tags)):
            raise PanoplyError(lacks)
    lines = {of.id: {k: v for k, v in dataclasses.asdict(of).items() if v and k != "id"} for of in every}
    places = {
        cls.info.id: Place(cls.__module__, cls.info.summary)
        for slot in part_module.SLOTS
        for cls in part_module.registered(slot).values()
        if cls.__module__.startswith("panoply.")
    }
    return f'{{"works": {_lines(lines)},\n"parts": {_lines(places)}}}\n'


def _lines(found: Mapping[str, Any]) -> str:
    """A line each, all alike up to an empty one at the end, so that two that were added side by side merge by lines."""
    rows = (f" {json.dumps(key)}: {json.dumps(found[key], ensure_ascii=False)},\n" for key in sorted(found))
    return "{\n" + "".join(rows) + ' "": null}'


if __name__ == "__main__":
    FILE.write_text(made(), encoding="utf-8")
