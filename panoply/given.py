"""What is handed over in Python rather than by name: methods, worlds, rows, functions. Here it becomes names and files.

A plan holds nothing but names, numbers and paths, so that it can be stored and carried out elsewhere. Rows and sources
are written to files named by their hash, first to a temporary folder that lasts as long as the process, then into the
folder of the run that uses them (`given/`).
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from panoply import registry
from panoply.checkpoint import clear_errors, write_atomically
from panoply.errors import PanoplyError, unknown
from panoply.kinds import is_method
from panoply.parts import Part
from panoply.regimes import Method

FOLDER = "given"
"""Where a run keeps what was handed over."""
CHANGED = "+changed"
"""What the id of a method has after it that is not quite the registered one."""
Slots = dict[str, Part | tuple[Part, ...] | None]

# ------------------------------------------------------------------ methods and worlds


def method_of(given: Any) -> tuple[str, Slots]:
    """The registered method that a name, a function or a value stands for, and the slots in which it differs."""
    if isinstance(given, str):
        return given, {}
    if callable(given) and not (is_method(given) or isinstance(given, Part)):
        known = [e.id for e in registry.registered() if inspect.unwrap(e.build) is given]
        if known:
            return known[0], {}
        given = given()
    if not is_method(given):
        raise PanoplyError(
            f"A method is a name such as 'grpo', or a value such as grpo().but(credit=…), not {given!r:.80}."
        )
    entry = nearest(given)
    theirs, mine = built(entry.id).slots(), given.slots()
    return entry.id, {slot: mine.get(slot) for slot in given.slot_of if mine.get(slot) != theirs.get(slot)}


@functools.cache
def nearest(method: Method) -> registry.Entry:
    """The registered method that differs in the fewest slots; of several rather one that is at home anywhere, then the
    one that differs in the fewest settings, and rather a base than what is built on it."""

    def distance(entry: registry.Entry) -> tuple[int, bool, int, int, int, str]:
        other = built(entry.id)
        mine, theirs = method.slots(), other.slots()
        apart = sum(mine.get(slot) != theirs.get(slot) for slot in method.slot_of)
        away = entry.world is not None
        return apart, away, len(method.diff(other)), _depth(entry), -entry.version, entry.id

    same = [e for e in registry.entries("method") if isinstance(built(e.id), type(method))]
    return min(same, key=distance)


@functools.cache
def _built(build: Callable[[], Method]) -> Method:
    return build()


def built(id: str) -> Method:
    """A registered method as it was published."""
    return _built(registry.find("method", id).build)


def _depth(entry: registry.Entry) -> int:
    """How many methods a method is built on, one on another."""
    return 0 if entry.base is None else 1 + _depth(registry.find("method", entry.base))


def world_of(given: Any) -> tuple[str | None, dict[str, Any]]:
    """The name of a world and the settings in which it differs from its defaults."""
    if given is None:
        return None, {}
    if isinstance(given, str):
        return _preset(given)
    cls = given if isinstance(given, type) else type(given)
    known = [e.id for e in registry.registered() if e.build is cls]
    if not known:
        raise PanoplyError(
            f"A world is a name such as 'chain', or one that was registered with @panoply.world, not {given!r:.80}."
        )
    if given is cls:
        return known[0], {}
    fields = {f.name: f for f in dataclasses.fields(given) if f.init}
    plain = {name: f.default for name, f in fields.items()}
    held = {name: getattr(given, name) for name in fields}
    return known[0], {f"world.{name}": value for name, value in held.items() if value != plain[name]}


def _preset(word: str) -> tuple[str, dict[str, Any]]:
    """`chain:wall` as a world and the settings of its preset; any other name as it is."""
    name, colon, preset = word.partition(":")
    if not colon or not any(line.name == name.split("@")[0] for line in registry.works("world")):
        return word, {}
    known = getattr(registry.find("world", name).build, "presets", {})
    if not known:  # `logged:cartpole-random` is a world by itself
        return word, {}
    if preset not in known:
        raise unknown(f"preset of {name}", preset, known)
    return name, {f"world.{setting}": value for setting, value in known[preset].settings.items()}


# ------------------------------------------------------------------ rows


def is_rows(data: Any) -> bool:
    """Whether data is handed over, and not named."""
    return data is not None and not isinstance(data, str | os.PathLike | Part)


def rows_file(data: Any) -> str:
    """Rows as a file of JSON lines, which is the same for the same rows."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows(data)]
    if not lines:
        raise PanoplyError("The data has no rows.")
    return str(keep("".join(lines), "data.jsonl"))


def rows(data: Any) -> Iterator[dict[str, Any]]:
    """The rows of a list, a Hugging Face `Dataset` or a data frame, as plain values."""
    if isinstance(data, Mapping):
        splits = [str(k) for k, v in data.items() if hasattr(v, "column_names")]
        raise PanoplyError(
            f"The data has several splits: choose one, such as data=dataset[{splits[0]!r}]."
            if splits
            else "Data is a list of rows, such as [{'prompt': …}, …], not a dictionary."
        )
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        data = data.to_dict("records")
    if not hasattr(data, "__len__") or not hasattr(data, "__iter__") or isinstance(data, bytes):
        raise PanoplyError(
            f"Data is a file, a list of rows or a Dataset, not a {type(data).__name__}: make a list of what is "
            "streamed."
        )
    for number, row in enumerate(data, 1):
        if not isinstance(row, Mapping):
            raise PanoplyError(f"Row {number} of the data is a {type(row).__name__}, not a dictionary.")
        yield {str(name): _plain(value, number, str(name)) for name, value in row.items()}


def _plain(value: Any, number: int, field: str) -> Any:
    """A value as JSON has it."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise PanoplyError(f"Row {number} of the data has {value} in its field '{field}'.")
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v, number, field) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, number, field) for v in value]
    if hasattr(value, "tolist"):  # arrays and their numbers
        return _plain(value.tolist(), number, field)
    raise PanoplyError(
        f"Row {number} of the data has a {type(value).__name__} in its field '{field}', which is no text, number or "
        "list: leave that field out."
    )


# ------------------------------------------------------------------ files


@functools.cache
def _temporary(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="panoply-given-"))
    atexit.register(_remove, folder, process)
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)


_KEPT = re.compile(r"(?P<folder>/[^:\0]*/panoply-given-[^/:]+/(?P<hash>[0-9a-f]{16}))/(?P<name>[^/:]+)")


def room() -> Path:
    """A folder that lasts as long as this process."""
    return _temporary(os.getpid())


def keep(text: str, name: str) -> Path:
    """A file with this text, for as long as the process lasts; the same path for the same text."""
    data = text.encode()
    path = room() / hashlib.sha256(data).hexdigest()[:16] / name
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return path


def without_places(value: Any) -> Any:
    """Paths of kept files as what is in them, wherever they lie."""
    return _mapped(value, lambda found: f"{found['hash']}/{found['name']}")


def adopt(value: Any, folder: Path) -> tuple[Any, dict[str, str]]:
    """Copy the kept files that a value names into a run's folder: the value that names them there, and their hashes."""
    hashes: dict[str, str] = {}

    def moved(found: re.Match[str]) -> str:
        try:
            data = Path(found[0]).read_bytes()
        except OSError as error:
            raise PanoplyError(
                f"{found[0]} is gone: what is handed over in Python lasts as long as its process. Make the plan again."
            ) from error
        target = folder / FOLDER / found["name"]
        if target.is_file() and target.read_bytes() != data:
            target = folder / FOLDER / f"{found['hash'][:4]}-{found['name']}"
        with clear_errors(f"write {target}"):
            target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, data.decode())
        hashes[f"{FOLDER}/{target.name}"] = hashlib.sha256(data).hexdigest()
        return str(target.resolve())

    return _mapped(value, moved), hashes


def relocated(value: Any, folder: Path, names: Iterable[str]) -> Any:
    """A stored value that names what lies in a run's folder, where that folder is now."""
    for name in names:
        value = _changed(value, functools.partial(_relocated, str(folder.resolve()), name))
    return value


def _relocated(folder: str, name: str, text: str) -> str:
    path, colon, rest = text.partition(":")
    return f"{folder}/{name}{colon}{rest}" if path.endswith(f"/{name}") else text


def changed_files(folder: Path, hashes: Mapping[str, str]) -> list[str]:
    """Which of the files that were handed over are gone or no longer the same."""
    found = []
    for name, known in hashes.items():
        path = folder / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != known:
            found.append(name)
    return found


def _mapped(value: Any, change: Callable[[re.Match[str]], str]) -> Any:
    """A value with the paths of kept files changed."""
    return _changed(value, lambda text: _KEPT.sub(change, text))


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A value of strings, tuples, lists and dictionaries with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_changed(v, change) for v in value)
    if isinstance(value, dict):
        return {k: _changed(v, change) for k, v in value.items()}
    return value
