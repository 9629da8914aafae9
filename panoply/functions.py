"""Works that are functions: called with settings by name, and what they give as a table.

An algorithm, a system or a protocol is a function whose keywords are its settings. What it returns is a table: numbers
by name, rows of them by name, a list of rows, or a dataclass of numbers.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from panoply import registry
from panoply.errors import PanoplyError, plain, unknown
from panoply.files import brief
from panoply.index import Listed
from panoply.parts import check, describe, show_value
from panoply.registry import Entry
from panoply.values import parse

CALLED = ("algorithm", "system", "protocol")
"""The kinds that are called."""
Rows = list[list[str]]


class Setting(NamedTuple):
    """A keyword of a function: its type, and its default where it has one."""

    annotation: Any
    value: Any = inspect.Parameter.empty


def takes(of: Setting) -> str:
    return describe(of.annotation)


def default(of: Setting) -> str:
    return "needed" if of.value is inspect.Parameter.empty else show_value(of.value)


def settings(entry: Entry, function: Callable[..., Any] | None = None, skip: int = 0) -> dict[str, Setting]:
    """What a work's function can be told; of one that judges a run, all but the run (`skip`)."""
    called = function or entry.build
    named = list(inspect.signature(called).parameters.values())[skip:]
    keywords = [p for p in named if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    written = {p.name: Any if p.annotation is p.empty else p.annotation for p in keywords}
    try:
        inside = inspect.unwrap(called).__globals__
        hints = typing.get_type_hints(types.SimpleNamespace(__annotations__=written), globalns=inside)
    except Exception as error:  # whatever evaluating someone's annotation may raise
        raise PanoplyError(f"A setting of {entry.name} has a type that is none: {error}.") from error
    return {p.name: Setting(hints[p.name], p.default) for p in keywords}


def find(name: str) -> Entry:
    """A work that can be called by its name; of any other it is said what to do with it instead."""
    entry = registry.find_any(name)
    if entry is not None and entry.kind in CALLED:
        return entry
    if entry is not None:
        instead = {
            "world": f"panoply train METHOD --world {entry.name}",
            "survey": f"panoply show {entry.name}",
        }
        command = instead.get(entry.kind, f"panoply train {entry.name}")
        raise PanoplyError(f"'{name}' is a {entry.kind}, which is not called: {command}.")
    raise unknown(
        "algorithm, system or protocol", name, {w.name for w in registry.works() if w.kind in CALLED}
    )


def given(
    entry: Entry, words: Mapping[str, Any], known: Mapping[str, Setting], seed: int | None = None
) -> dict[str, Any]:
    """The keywords of a call, read from words and checked."""
    found: dict[str, Any] = {}
    for name, value in words.items():
        if name not in known:
            raise unknown(f"setting of {entry.name}", name, known)
        where, wanted = f"{entry.name}.{name}", known[name].annotation
        found[name] = parse(where, value, wanted) if isinstance(value, str) else check(where, value, wanted)
    if seed is not None:
        if "seed" not in known:
            raise PanoplyError(f"{entry.name} draws nothing, so a seed has no effect: leave it out.")
        found["seed"] = seed
    for name, of in known.items():
        if of.value is inspect.Parameter.empty and name not in found:
            raise PanoplyError(f"{entry.name} needs {name}: --set {name}=VALUE.")
    return found


def call(name: str, words: Mapping[str, Any] | None = None, seed: int | None = None) -> Any:
    """What a work gives that is a function: `call("sharpe-ratio-at-k", seed=3)`."""
    entry = find(name)
    return called(entry, entry.build, **given(entry, words or {}, settings(entry), seed))


def called(entry: Entry, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """What a function of a work returns; that it raised something is said in a sentence."""
    try:
        return function(*args, **keywords)
    except PanoplyError:
        raise
    except Exception as error:
        raise PanoplyError(
            f"{entry.name} cannot be computed with that: {type(error).__name__}: {plain(error)}."
        ) from error


# ------------------------------------------------------------------ tables


def rows_of(found: Any, name: str) -> Rows:
    """What a function gave as a table, the first row its head; anything else is refused."""
    given = plain_of(found)
    if isinstance(given, Mapping) and given and all(isinstance(v, Mapping) for v in given.values()):
        columns = list(dict.fromkeys(column for row in given.values() for column in row))
        return [["", *columns], *([key, *(_cell(row.get(c)) for c in columns)] for key, row in given.items())]
    if isinstance(given, Mapping) and given and not any(isinstance(v, Mapping) for v in given.values()):
        return [["", "value"], *([key, _cell(value)] for key, value in given.items())]
    if isinstance(given, list) and given and all(isinstance(row, Mapping) for row in given):
        columns = list(dict.fromkeys(column for row in given for column in row))
        return [columns, *([_cell(row.get(c)) for c in columns] for row in given)]
    raise PanoplyError(f"{name} gives {brief(found)}, which is no table: numbers by name, or rows of them.")


def plain_of(found: Any) -> Any:
    """The same of plain Python: dataclasses by their fields, arrays and tensors as numbers and lists."""
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return {f.name: plain_of(getattr(found, f.name)) for f in dataclasses.fields(found)}
    if isinstance(found, Mapping):
        return {str(key): plain_of(value) for key, value in found.items()}
    if hasattr(found, "tolist"):
        return found.tolist()
    if isinstance(found, Sequence) and not isinstance(found, str):
        return [plain_of(value) for value in found]
    return found


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return "–" if value is None else str(value)


# ------------------------------------------------------------------ surveys


def ordered(entry: Entry) -> dict[str, list[Listed]]:
    """The works a survey names, by its headings; a name that is not registered is refused."""
    known = {line.name: line for line in registry.works()}
    found: dict[str, list[Listed]] = {}
    for heading, names in dict(entry.build()).items():
        for name in names:
            if name not in known:
                raise unknown(f"work in the survey {entry.name}", name, known)
        found[heading] = [known[name] for name in names]
    return found
