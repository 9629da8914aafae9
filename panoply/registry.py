"""Finding methods, worlds and parts by name, without importing what is not asked for.

What is built in is found through a generated index (`index.py`), so that one method imports one method. Others register
through a file or an installed package (`extensions.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from panoply import index
from panoply import parts as part_module
from panoply.entries import ENTRIES as ENTRIES
from panoply.entries import Entry as Entry
from panoply.entries import Published as Published
from panoply.entries import enter
from panoply.errors import PanoplyError, plain, unknown
from panoply.extensions import load_installed
from panoply.files import brief
from panoply.index import Kind, Listed
from panoply.parts import SLOTS, Part
from panoply.recipes import Recipe
from panoply.regimes import Method

Build = TypeVar("Build", bound=Callable[..., Any])
T = TypeVar("T", bound=type)

if TYPE_CHECKING:
    from panoply.evidence.claims import Claim


def _checked(id: str, build: Callable[..., Any], wanted: type) -> Callable[..., Any]:
    """The function that makes a method or a recipe; one that raises, or makes something else, is said to."""

    @functools.wraps(build)
    def made(*args: Any, **kwargs: Any) -> Any:
        try:
            found = build(*args, **kwargs)
        except PanoplyError:
            raise
        except Exception as error:
            raise PanoplyError(f"'{id}' cannot be made: {type(error).__name__}: {plain(error)}.") from error
        if not isinstance(found, wanted):
            raise PanoplyError(
                f"'{id}' is registered as a {wanted.__name__.lower()} and makes {brief(found)}."
            )
        return found

    return made


def _family(module: str) -> str | None:
    pieces = module.split(".")
    return pieces[2].replace("_", "-") if pieces[:2] == ["panoply", "methods"] and len(pieces) > 3 else None


def _registering(
    id: str, kind: Kind, wanted: type | None, family: str | None, tags: Sequence[str], **facts: Any
) -> Callable[[Build], Build]:
    """What all decorators of functions do: enter the function, checked where it makes a value, and hand it back."""

    def register(build: Build) -> Build:
        made = build if wanted is None else _checked(id, build, wanted)
        words = tags if isinstance(tags, str) else tuple(tags)
        enter(Entry(id, kind, made, family=family or _family(build.__module__), tags=words, **facts))  # type: ignore[arg-type]
        return build

    return register


def method(
    id: str,
    *,
    paper: int | None = None,
    base: str | None = None,
    family: str | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    world: str | None = None,
    claim: Claim | None = None,
    published: Published | None = None,
    tags: Sequence[str] = (),
) -> Callable[[Build], Build]:
    """Register a function that returns a method. A changed default is a new version of the id.

    `presets` are named sets of settings for kinds of world, such as `{"tiny": {"update.lr": 3e-4}}`; where none are
    given it has those of its base, as far as it has such settings, and with `{}` it has none. `world` is where
    the method is at home; `claim` is what its paper found, for `panoply claim` to measure; `published` says which
    source states which settings, such as `{"arXiv 2402.03300, §4.2": {"sample.group": 64}}`; `tags` are words to find
    it by, beside those that follow from what it is.
    """
    facts = {"base": base, "stated": presets, "world": world, "published": published or {}}
    return _registering(id, "method", Method, family, tags, paper=paper, claim=claim, **facts)


def recipe(
    id: str,
    *,
    paper: int | None = None,
    family: str | None = None,
    world: str | None = None,
    claim: Claim | None = None,
    tags: Sequence[str] = (),
) -> Callable[[Build], Build]:
    """Register a function that returns a recipe: a work that is a pipeline of runs."""
    return _registering(id, "recipe", Recipe, family, tags, paper=paper, claim=claim, world=world)


def algorithm(
    id: str,
    *,
    paper: int | None = None,
    family: str | None = None,
    claim: Claim | None = None,
    tags: Sequence[str] = (),
) -> Callable[[Build], Build]:
    """Register a work that solves a small problem by itself, without a policy that a run trains.

    The function's keywords are its settings, `seed` among them where it draws; it returns a table: numbers by name, or
    rows of them by name. `panoply run NAME --set KEYWORD=VALUE` calls it and prints that.
    """
    return _registering(id, "algorithm", None, family, tags, paper=paper, claim=claim)


def system(
    id: str,
    *,
    paper: int | None = None,
    family: str | None = None,
    claim: Claim | None = None,
    tags: Sequence[str] = (),
) -> Callable[[Build], Build]:
    """Register a work about how things run; the function measures what it promises, and returns a table of that."""
    return _registering(id, "system", None, family, tags, paper=paper, claim=claim)


def protocol(
    id: str,
    *,
    paper: int | None = None,
    family: str | None = None,
    claim: Claim | None = None,
    tags: Sequence[str] = (),
    judge: Callable[..., Mapping[str, Any]] | None = None,
) -> Callable[[Build], Build]:
    """Register a work about how to judge. The function shows it on an example of its own, and returns a table.

    `judge` takes a `Judged` run (its world, its checkpoints as policies, its data) and keywords, and returns a table:
    `panoply eval RUN --by NAME --set KEYWORD=VALUE` prints it.
    """
    return _registering(id, "protocol", None, family, tags, paper=paper, claim=claim, judge=judge)


def survey(
    id: str,
    *,
    paper: int | None = None,
    family: str | None = None,
    claim: Claim | None = None,
    tags: Sequence[str] = (),
    judge: Callable[..., Mapping[str, Any]] | None = None,
) -> Callable[[Build], Build]:
    """Register a work that orders others. The function returns its order: works that are here, by heading.

    `panoply show NAME` prints them with what each is; a name that is not registered is refused. `having` names those
    with some tags. One that also says how to judge has a `judge`, as a protocol has.
    """
    return _registering(id, "survey", None, family, tags, paper=paper, claim=claim, judge=judge)


def world(
    id: str,
    *,
    paper: int | None = None,
    family: str | None = None,
    claim: Claim | None = None,
    tags: Sequence[str] = (),
) -> Callable[[T], T]:
    """Register a frozen dataclass as a world; its fields are its options."""

    def register(cls: T) -> T:
        if not dataclasses.is_dataclass(cls) or not hasattr(cls, "medium"):
            raise PanoplyError(
                f"'{id}' is registered as a world and is none: a world is a frozen dataclass that inherits from "
                "TextWorld or ControlWorld."
            )
        enter(Entry(id, "world", cls, paper, family, claim=claim, tags=tuple(tags)))
        return cls

    return register


# ------------------------------------------------------------------ look-up


def find(kind: Kind, name: str) -> Entry:
    """The entry of that name (`grpo`, or `grpo@1`); the newest version where none is given."""
    slug = name.split("@")[0]
    for line in index.works().values():
        if line.kind == kind and line.name == slug:
            _import(line.module)
    matching = [e for e in ENTRIES.values() if e.kind == kind and name in (e.id, e.name)]
    if not matching:
        matching = [e for e in entries(kind) if name in (e.id, e.name)]
    if not matching and kind == "world" and (found := implied(slug)) is not None:
        return found
    if not matching and kind == "world" and slug in _libraries():
        raise PanoplyError(
            f"{slug} is a library of environments: name one of them, {slug}:NAME or {slug}:OPTION=VALUE."
        )
    if not matching:
        same = [e.id for e in entries(kind) if e.name == slug]
        more = [*_gymnasium_ids(), *_environments(name)] if kind == "world" else []
        raise unknown(kind, name, same or [*(e.name for e in entries(kind)), *more])
    return max(matching, key=lambda e: e.version)


def find_any(name: str) -> Entry | None:
    """The entry of that name, of whatever kind it is; None where there is none."""
    for line in works():
        if name in (line.id, line.name):
            return find(line.kind, name)
    return next((e for e in entries() if name in (e.id, e.name)), None)


def having(*lines: str) -> tuple[str, ...]:
    """Methods and recipes with all tags of one of some lines, by name: `having("data=prefs feedback=online")`."""
    wanted = [set(line.split()) for line in lines]
    found = (w for w in works() if w.kind in ("method", "recipe"))
    return tuple(w.name for w in found if any(line <= set(w.tags) for line in wanted))


def here(*names: str) -> tuple[str, ...]:
    """Those of some names that are registered, as some of a survey's works may not be."""
    known = {w.name for w in works()}
    return tuple(name for name in names if name in known)


def implied(name: str) -> Entry | None:
    """The world that a name stands for without being registered: `logged:WORLD-MIX`, `LIBRARY:ENVIRONMENT` of one that
    speaks text, or an id of Gymnasium's."""
    from panoply.worlds.control import gymnasium
    from panoply.worlds.logged import logged
    from panoply.worlds.text import spoken

    return logged.entry_for(name) or spoken.entry_for(name) or gymnasium.entry_for(name)


def _gymnasium_ids() -> list[str]:
    from panoply.worlds.control.gymnasium import known_ids

    return known_ids()


def _environments(name: str) -> list[str]:
    """What the name of an environment would be in each of the known libraries."""
    _, colon, rest = name.partition(":")
    return [f"{library}:{rest}" for library in _libraries()] if colon else []


def _libraries() -> list[str]:
    from panoply.environments.environment import LIBRARIES

    return list(LIBRARIES)


def is_recipe(name: str) -> bool:
    """Whether a name stands for a recipe and not for a method."""
    return any(name in (line.id, line.name) for line in works("recipe"))


def works(kind: Kind | None = None) -> list[Listed]:
    """A line for everything there is, plug-ins included. Imports none of what is built in."""
    load_installed()
    found = {**index.works(), **{e.id: e.listed() for e in registered() if e.id not in index.works()}}
    return sorted((w for w in found.values() if kind in (None, w.kind)), key=lambda w: (w.kind, w.id))


def names(kind: Kind) -> set[str]:
    """The names of all works of a kind, without their versions."""
    return {line.name for line in works(kind)}


def registered() -> list[Entry]:
    """Everything that has been imported so far."""
    return list(ENTRIES.values())


def entries(kind: Kind | None = None) -> list[Entry]:
    """Everything registered, plug-ins included. Imports all of it."""
    import_all()
    load_installed()
    return sorted((e for e in ENTRIES.values() if kind in (None, e.kind)), key=lambda e: (e.kind, e.id))


class PartsOf(Mapping[str, type[Part]]):
    """The parts of a slot by name. Names are known without importing anything; a part is imported when it is taken."""

    def __init__(self, slot: str):
        self._slot, self._here = slot, part_module.registered(slot)
        self._there = index.parts().get(slot, {})

    def __iter__(self) -> Iterator[str]:
        return iter({**self._there, **self._here})

    def __len__(self) -> int:
        return len({**self._there, **self._here})

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (
            name in self._here or name in self._there or bool(self._short(name))
        )

    def __getitem__(self, name: str) -> type[Part]:
        key = self._key(name)
        if key not in self._here and key in self._there:
            _import(self._there[key].module)
        return self._here[key]

    def summary(self, name: str) -> str:
        """What a part does, in a line."""
        there = self._there.get(self._key(name))
        return there.summary if there else self[name].info.summary

    def _short(self, name: str) -> list[str]:
        """The parts in files of methods whose own name it is: `constrained` of `cgpo/constrained`."""
        return [key for key in self if key.endswith(f"/{name}")]

    def _key(self, name: str) -> str:
        """The whole name of a part. The short one will do where it is the only one of that name."""
        if name in self._here or name in self._there:
            return name
        found = self._short(name)
        if len(found) > 1:
            raise PanoplyError(
                f"'{name}' is a {self._slot} part of several works: name {' or '.join(sorted(found))}."
            )
        return found[0] if found else name


def parts(slot: str) -> PartsOf:
    """The parts of a slot: those that are built in, and what plug-ins have registered so far."""
    if slot not in SLOTS:
        raise unknown("slot", slot, SLOTS)
    return PartsOf(slot)


def find_part(slot: str, name: str) -> type[Part]:
    """The part of a slot by its name, imported now if it was not before."""
    known = parts(slot)
    if name not in known:
        entries()
    if name not in known:
        raise unknown(f"{slot} part", name, known)
    return known[name]


# ------------------------------------------------------------------ importing


def _import(module: str) -> None:
    """Import a module that the index names; one that is gone since it was written is passed over."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise


def _modules(package: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return
    for found in pkgutil.iter_modules(spec.submodule_search_locations):
        name = f"{package}.{found.name}"
        if found.ispkg:
            yield from _modules(name)
        else:
            yield name


def import_all() -> None:
    """Import every built-in method, world and part."""
    for module in _built_in():
        importlib.import_module(module)


@functools.cache
def _built_in() -> tuple[str, ...]:
    return tuple(m for of in ("methods", "worlds", "slots") for m in _modules(f"panoply.{of}"))
