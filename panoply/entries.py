"""What is registered: a work, where it comes from, and what is said of it."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from panoply import index, tags
from panoply.errors import PanoplyError
from panoply.files import brief
from panoply.index import Kind, Listed
from panoply.regimes import Method

if TYPE_CHECKING:
    from panoply.evidence.claims import Claim

Published = Mapping[str, Mapping[str, Any]]
"""Who states which settings: source → path → value (see `panoply/published.py`)."""


@dataclass(frozen=True)
class Entry:
    """A registered work: how to build it, and where it comes from."""

    id: str
    kind: Kind
    build: Callable[..., Any]
    paper: int | None = None
    family: str | None = None
    base: str | None = None
    stated: Mapping[str, Mapping[str, Any]] | None = None
    """Presets of its own; None where it has those of its base."""
    world: str | None = None
    """Where a method is at home, if that is not just anywhere."""
    claim: Claim | None = None
    """What its paper found, in a form that can be measured here."""
    published: Published = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    """Words it can be found by, such as `exploration` or `feedback=offline`; more follow from what it is."""
    judge: Callable[..., Mapping[str, Any]] | None = None
    """Of a protocol: what judges a run by it (see `evaluation/judged.py`)."""

    @property
    def name(self) -> str:
        return self.id.split("@")[0]

    @property
    def version(self) -> int:
        return int(self.id.split("@")[1])

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.build) or ""

    @property
    def summary(self) -> str:
        """What it is, in whole sentences: the first paragraph, and where that is but a title, the sentence after it."""
        first, *rest = [" ".join(block.split()) for block in self.doc.split("\n\n")]
        if rest and re.fullmatch(r"[^:]*\([^()]*\)\.", first):
            return f"{first} {re.split(r'(?<=[.?]) (?=[A-Z])', rest[0])[0]}"
        return first

    @property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings by name, for kinds of world: its own, or its base's as far as it has such settings."""
        if self.stated is not None or self.base is None:
            return self.stated or {}
        from panoply import compose, registry

        made: Method = self.build()
        base = registry.find("method", self.base)
        return {name: compose.fitting(made, settings) for name, settings in base.presets.items()}

    def listed(self) -> Listed:
        """Its line in the index: what can be said of it without importing it."""
        needs = self.build().needs() if self.kind == "method" else frozenset()
        return Listed(
            self.id,
            self.kind,
            self.build.__module__,
            self.summary,
            self.family,
            self.base,
            self.world,
            self.paper,
            tuple(sorted(tags.joined(self.tags, self._follows()))),
            tuple(sorted(needs)),
            self.claim is not None,
        )

    def _follows(self) -> set[str]:
        """Tags that follow from what it is: its kind, a world's medium, a method's regime and answers to surveys."""
        if self.kind == "world":
            return {str(getattr(self.build, "medium", "text"))}
        if self.kind == "recipe":
            return {"recipe", *tags.of_recipe(self.build())}
        if self.kind != "method":
            return {self.kind}
        made: Method = self.build()
        slots = made.slots()
        found = {made.regime.replace("_", "-"), *tags.of_method(made, self._acts())}
        return found | ({"critic"} if slots.get("models") or slots.get("networks") else set())

    def _acts(self) -> bool:
        """Whether it is at home in a world of control."""
        home = (self.world or "").split(":")[0]
        here = [
            getattr(e.build, "medium", "") for e in ENTRIES.values() if (e.kind, e.name) == ("world", home)
        ]
        return "control" in (
            *here,
            *(tag for of in index.works().values() if of.name == home for tag in of.tags),
        )


ENTRIES: dict[str, Entry] = {}
SAID = {"stated": "presets"}
"""Fields whose keyword has another name."""
TAG = re.compile(r"[a-z0-9_+-]+(=[a-z0-9_+-]+)?")


def enter(entry: Entry) -> None:
    """Take a work into the registry, or say what is wrong with it."""
    name, _, version = entry.id.partition("@") if isinstance(entry.id, str) else ("", "", "")
    if not name or not version.isdigit():
        raise PanoplyError(f"'{entry.id}' is not a versioned id such as 'grpo@1'.")
    _check_facts(entry)
    known = ENTRIES.get(entry.id)
    if known is not None and known.build.__module__ != entry.build.__module__:
        raise PanoplyError(
            f"'{entry.id}' is registered twice, by {known.build.__module__} and {entry.build.__module__}."
        )
    ENTRIES[entry.id] = entry


def _check_facts(entry: Entry) -> None:
    """What is said of a work is of the types that all who read it expect."""
    words: dict[str, type | types.UnionType] = dict.fromkeys(("family", "base", "world"), str | None)
    for name, wanted in {
        **words,
        "paper": int | None,
        "stated": Mapping | None,
        "published": Mapping,
    }.items():
        if not isinstance(given := getattr(entry, name), wanted):
            raise PanoplyError(f"'{entry.id}' is registered with {SAID.get(name, name)}={brief(given)}.")
    if not isinstance(entry.tags, tuple) or not all(
        isinstance(t, str) and TAG.fullmatch(t) for t in entry.tags
    ):
        raise PanoplyError(
            f"Tags of '{entry.id}' are words such as exploration or feedback=offline, not {brief(entry.tags)}."
        )
    tags.check(entry.id, entry.tags)
    for name in ("stated", "published"):
        for key, value in (getattr(entry, name) or {}).items():
            if not isinstance(key, str) or not isinstance(value, Mapping):
                raise PanoplyError(
                    f"{SAID.get(name, name)} of '{entry.id}' are settings by name, not {brief(key)}: {brief(value)}."
                )
