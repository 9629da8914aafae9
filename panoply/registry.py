"""Finding methods, worlds and parts by name, without importing what is not asked for.

Built-in methods are found by file name (`methods/<family>/<slug>.py`), worlds and parts by their folder. Others
register through a file (`--plugin FILE.py`) or an installed package's entry point in the group `panoply.plugins`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_origin

from panoply import parts as part_module
from panoply import trust
from panoply.errors import PanoplyError, plain, unknown
from panoply.files import NotYaml, brief, is_file, parse_yaml, read_bytes
from panoply.parts import SLOTS, Part, fits, options
from panoply.recipes import Recipe
from panoply.regimes import Method

if TYPE_CHECKING:
    from panoply.evidence.claims import Claim

Kind = Literal["method", "world", "recipe", "protocol", "system", "survey"]
Published = Mapping[str, Mapping[str, Any]]
"""Who states which settings: source → path → value (see `panoply/published.py`)."""
R = TypeVar("R")
T = TypeVar("T", bound=type)
M = TypeVar("M", bound=Method)


@dataclass(frozen=True)
class Entry:
    """A registered work: how to build it, and where it comes from."""

    id: str
    kind: Kind
    build: Callable[..., Any]
    paper: int | None = None
    family: str | None = None
    base: str | None = None
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    world: str | None = None
    """Where a method is at home, if that is not just anywhere."""
    claim: Claim | None = None
    """What its paper found, in a form that can be measured here."""
    published: Published = field(default_factory=dict)

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

    def facts(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": self.kind,
            "paper": self.paper,
            "family": self.family,
            "base": self.base,
            "world": self.world,
        }


_ENTRIES: dict[str, Entry] = {}


def _register(entry: Entry) -> None:
    name, _, version = entry.id.partition("@") if isinstance(entry.id, str) else ("", "", "")
    if not name or not version.isdigit():
        raise PanoplyError(f"'{entry.id}' is not a versioned id such as 'grpo@1'.")
    _check_facts(entry)
    known = _ENTRIES.get(entry.id)
    if known is not None and known.build.__module__ != entry.build.__module__:
        raise PanoplyError(
            f"'{entry.id}' is registered twice, by {known.build.__module__} and {entry.build.__module__}."
        )
    _ENTRIES[entry.id] = entry


def _check_facts(entry: Entry) -> None:
    """What is said of a work is of the types that all who read it expect."""
    words: dict[str, type | types.UnionType] = dict.fromkeys(("family", "base", "world"), str | None)
    for name, wanted in {**words, "paper": int | None, "presets": Mapping, "published": Mapping}.items():
        if not isinstance(getattr(entry, name), wanted):
            raise PanoplyError(f"'{entry.id}' is registered with {name}={brief(getattr(entry, name))}.")
    for name in ("presets", "published"):
        for key, value in getattr(entry, name).items():
            if not isinstance(key, str) or not isinstance(value, Mapping):
                raise PanoplyError(
                    f"{name} of '{entry.id}' are settings by name, not {brief(key)}: {brief(value)}."
                )


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
) -> Callable[[Callable[..., M]], Callable[..., M]]:
    """Register a function that returns a method. A changed default is a new version of the id.

    `presets` are named sets of settings for kinds of world, such as `{"tiny": {"update.lr": 3e-4}}`; `world` is where
    the method is at home; `claim` is what its paper found, for `panoply claim` to measure; `published` says which
    source states which settings, such as `{"arXiv 2402.03300, §4.2": {"sample.group": 64}}`.
    """

    def register(build: Callable[..., M]) -> Callable[..., M]:
        of = family or _family(build.__module__)
        _register(
            Entry(
                id,
                "method",
                _checked(id, build, Method),
                paper,
                of,
                base,
                presets or {},
                world,
                claim,
                published or {},
            )
        )
        return build

    return register


def recipe(
    id: str,
    *,
    paper: int | None = None,
    family: str | None = None,
    world: str | None = None,
    claim: Claim | None = None,
) -> Callable[[Callable[..., Recipe]], Callable[..., Recipe]]:
    """Register a function that returns a recipe: a work that is a pipeline of runs."""

    def register(build: Callable[..., Recipe]) -> Callable[..., Recipe]:
        of = family or _family(build.__module__)
        _register(Entry(id, "recipe", _checked(id, build, Recipe), paper, of, world=world, claim=claim))
        return build

    return register


def system(
    id: str, *, paper: int | None = None, family: str | None = None, claim: Claim | None = None
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Register a work about how things run; the function measures what it promises."""

    def register(measure: Callable[..., R]) -> Callable[..., R]:
        of = family or _family(measure.__module__)
        _register(Entry(id, "system", measure, paper, of, claim=claim))
        return measure

    return register


def protocol(
    id: str, *, paper: int | None = None, family: str | None = None, claim: Claim | None = None
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Register a work about how to judge; the function judges by it."""

    def register(judge: Callable[..., R]) -> Callable[..., R]:
        of = family or _family(judge.__module__)
        _register(Entry(id, "protocol", judge, paper, of, claim=claim))
        return judge

    return register


def world(
    id: str, *, paper: int | None = None, family: str | None = None, claim: Claim | None = None
) -> Callable[[T], T]:
    """Register a frozen dataclass as a world; its fields are its options."""

    def register(cls: T) -> T:
        if not dataclasses.is_dataclass(cls) or not hasattr(cls, "medium"):
            raise PanoplyError(
                f"'{id}' is registered as a world and is none: a world is a frozen dataclass that inherits from "
                "TextWorld or ControlWorld."
            )
        _register(Entry(id, "world", cls, paper, family, claim=claim))
        return cls

    return register


# ------------------------------------------------------------------ look-up


def find(kind: Kind, name: str) -> Entry:
    """The entry of that name (`grpo`, or `grpo@1`); the newest version where none is given."""
    slug = name.split("@")[0]
    _import_slug(kind, slug)
    matching = [e for e in _ENTRIES.values() if e.kind == kind and name in (e.id, e.name)]
    if not matching:
        matching = [e for e in entries(kind) if name in (e.id, e.name)]
    if not matching and kind == "world" and (found := implied(slug)) is not None:
        return found
    if not matching:
        same = [e.id for e in entries(kind) if e.name == slug]
        more = _gymnasium_ids() if kind == "world" else []
        raise unknown(kind, name, same or [*(e.name for e in entries(kind)), *more])
    return max(matching, key=lambda e: e.version)


def implied(name: str) -> Entry | None:
    """The world that a name stands for without being registered: `logged:WORLD-MIX`, or an id of Gymnasium's."""
    from panoply.worlds.control import gymnasium
    from panoply.worlds.logged import logged

    return logged.entry_for(name) or gymnasium.entry_for(name)


def _gymnasium_ids() -> list[str]:
    from panoply.worlds.control.gymnasium import known_ids

    return known_ids()


def is_recipe(name: str) -> bool:
    """Whether a name stands for a recipe and not for a method."""
    _import_slug("recipe", name.split("@")[0])
    return any(e.kind == "recipe" and name in (e.id, e.name) for e in _ENTRIES.values())


def entries(kind: Kind | None = None) -> list[Entry]:
    """Everything registered, plug-ins included. Imports all of it."""
    _import_below("panoply.methods")
    _import_below("panoply.worlds")
    _load_entry_points()
    return sorted((e for e in _ENTRIES.values() if kind in (None, e.kind)), key=lambda e: (e.kind, e.id))


def parts(slot: str) -> Mapping[str, type[Part]]:
    """The parts of a slot: the slot's own folder, and whatever methods and plug-ins have registered so far."""
    if slot not in SLOTS:
        raise unknown("slot", slot, SLOTS)
    _import_below(f"panoply.slots.{slot}")
    return part_module.registered(slot)


def find_part(slot: str, name: str) -> type[Part]:
    known = parts(slot)
    if name not in known:
        entries()
    if name not in known:
        raise unknown(f"{slot} part", name, known)
    return known[name]


def part_from_json(data: Mapping[str, Any]) -> Part:
    settings = dict(data)
    slot, _, name = str(settings.pop("part")).partition(".")
    cls = find_part(slot, name)
    for setting in settings:
        if setting not in cls.annotations():
            raise unknown(f"setting of {cls.info.id}", setting, cls.annotations())
    return cls(**{k: value_from_json(v) for k, v in settings.items()})


def value_from_json(value: Any) -> Any:
    if isinstance(value, Mapping) and "part" in value:
        return part_from_json(value)
    if isinstance(value, list):
        return tuple(value_from_json(v) for v in value)
    return value


def parse(where: str, text: str, annotation: Any) -> Any:
    """A command-line word as the annotation wants it; a part of another slot is named by its name."""
    word = text.strip()
    guesses: list[Any] = [None] if word.lower() in ("none", "null") else []
    guesses += [{"true": True, "false": False}[word.lower()]] if word.lower() in ("true", "false") else []
    for number in (int, float):
        try:
            guesses.append(number(word))
        except ValueError:
            continue
    if word.startswith("["):
        guesses.append(value_from_json(yaml_value(word)))
    elif "," in word or any(get_origin(option) is tuple for option in options(annotation)):
        guesses.append(tuple(value_from_json(yaml_value(w)) for w in word.split(",")))
    guesses.append(word)
    for option in options(annotation):
        for guess in guesses:
            good, coerced = fits(guess, option)
            if good:
                return coerced
        if option is Part and word.lower() not in ("true", "false", "none", "null"):
            slot = where.rsplit(".", 1)[-1]
            return find_part(slot if slot in SLOTS else "schedule", word)()
    return part_module.check(where, guesses[0], annotation)


def yaml_value(word: str) -> Any:
    """What YAML makes of a word, or the word itself where it is none."""
    try:
        return parse_yaml(word, f"'{plain(word[:40])}'")
    except NotYaml:
        return word


# ------------------------------------------------------------------ importing


def stem(slug: str) -> str:
    """The file that holds a method: `td3+bc` → `td3_plus_bc`, `dr-grpo` → `dr_grpo`."""
    return slug.replace("++", "_plus_plus").replace("+", "_plus_").replace("-", "_")


def _import_slug(kind: Kind, slug: str) -> None:
    package = "panoply.worlds" if kind == "world" else "panoply.methods"
    for module in _modules(package):
        if module.rsplit(".", 1)[-1] == stem(slug):
            importlib.import_module(module)


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


def _import_below(package: str) -> None:
    for module in _modules(package):
        importlib.import_module(module)


_loaded_entry_points: set[str] = set()


def _load_entry_points() -> None:
    for point in importlib.metadata.entry_points(group="panoply.plugins"):
        if point.name not in _loaded_entry_points:
            _loaded_entry_points.add(point.name)
            try:
                point.load()
            except Exception as error:
                _loaded_entry_points.discard(point.name)
                raise PanoplyError(
                    f"The installed plug-in '{point.name}' cannot be loaded: {error}."
                ) from error


def load_plugin(file: str | Path) -> None:
    """Run a Python file whose decorators register parts, methods or worlds. Loading it twice is harmless."""
    path = Path(os.path.realpath(file))
    if not is_file(path):
        raise PanoplyError(f"There is no plug-in file '{file}'.")
    name = _module_name(path)
    if name in sys.modules or _is_loaded(path) or _is_here(path):
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PanoplyError(f"The plug-in '{file}' is not a Python file.")
    source = read_bytes(path)
    trust.remember_key(hashlib.sha256(source).hexdigest(), str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _loading.append(str(file))
    try:
        exec(
            compile(source, str(path), "exec"), vars(module)
        )  # what was hashed, and no cached byte code of others
    except PanoplyError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PanoplyError(
            f"The plug-in '{file}' cannot be loaded: {type(error).__name__}: {error}."
        ) from error
    finally:
        _loading.pop()


_loading: list[str] = []


def check_not_loading() -> None:
    """Refuse to train while a plug-in is loaded: a script that is its own plug-in would start itself for ever."""
    if _loading:
        raise PanoplyError(
            f"{_loading[-1]} trains while it is loaded as a plug-in: put that below if __name__ == '__main__'."
        )


def _module_name(path: Path) -> str:
    """A file has a module of its own; definitions that runs keep have one for the same text, wherever it lies."""
    from panoply import session

    what = path.read_bytes() if session.is_written(path) else str(path).encode()
    return f"panoply_plugin_{path.stem}_{hashlib.sha256(what).hexdigest()[:8]}"


def _is_loaded(path: Path) -> bool:
    """Whether a file is a module already: one that was imported, or the script that runs."""
    named = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return any(
        isinstance(file, str) and Path(file).name == path.name and Path(file).resolve() == path
        for file in named
    )


def _is_here(path: Path) -> bool:
    from panoply import session

    return session.is_here(path)
