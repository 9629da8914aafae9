"""Reading what others wrote: JSON, JSON lines, YAML, tensors and folders, each held against a schema.

A file may be cut short, of another kind, nested a thousand deep, or a pipe that never ends. Whatever is wrong with it
becomes one sentence that names the file, the line and the field (`BadFile`); nothing blocks, and nothing is unpickled.

A schema is a type: `int`, `float`, `str`, `bool`, `None`, `Any`, `list[X]`, `dict[str, X]`, unions of them, literals,
and for objects a `TypedDict`, whose keys are needed unless they are `NotRequired`. Keys it does not name may be there.

    class Facts(TypedDict):
        bytes: int
        sha256: NotRequired[str]

    facts = read_json(path, Facts)
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import stat
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, NamedTuple, TypeVar

from panoply.errors import PanoplyError, plain

if TYPE_CHECKING:
    from torch import Tensor

MOST_BYTES = 2**28
"""Of a file of JSON, and of one line of JSON lines."""
DEEPEST = 64
"""Lists and objects inside one another; more is no file of ours, and recursion would end in it."""

T = TypeVar("T")


class BadFile(PanoplyError):
    """A file or folder that cannot be read, or holds something else than it should."""


class NoFile(BadFile):
    """A file or folder that is not there."""


class NotYaml(BadFile):
    """A text that is no YAML: perhaps it was meant as it is."""


class Line(NamedTuple, Generic[T]):
    """One line of JSON lines: its number from 1 on, the bytes at which it begins and ends, and what it holds."""

    number: int
    start: int
    end: int
    value: T


# ------------------------------------------------------------------ files and folders


def open_file(path: str | Path) -> io.BufferedReader:
    """A regular file, open for reading; a pipe, socket or device in its place is refused without waiting for it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoFile(f"There is no file {plain(path)}.") from error
    except (OSError, ValueError) as error:
        raise BadFile(f"{plain(path)} cannot be read: {_reason(error)}.") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise BadFile(f"{plain(path)} is not a file that can be read.")
    return os.fdopen(handle, "rb")


def is_file(path: str | Path) -> bool:
    """Whether there is something of that name that is no folder: also what `open_file` then refuses."""
    try:
        return not stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def is_folder(path: str | Path) -> bool:
    """Whether there is such a folder; a name that the system does not even allow is none."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_folder(path: str | Path, what: str, *needed: str) -> Path:
    """A folder that holds the files it must hold to be `what` it is said to be, such as a run."""
    found = Path(path)
    try:
        if not stat.S_ISDIR(os.stat(found).st_mode):
            raise BadFile(f"'{plain(path)}' is not a {what}: it is a file.")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoFile(f"There is no {what} folder '{plain(path)}'.") from error
    except (OSError, ValueError) as error:
        raise BadFile(f"'{plain(path)}' cannot be read: {_reason(error)}.") from error
    for name in needed:
        if not is_file(found / name):
            raise BadFile(f"'{plain(path)}' is not a {what}: it has no {name}.")
    return found


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder of files. Pipes, devices and links to folders, which might never end, are refused."""
    target.mkdir(parents=True)
    for item in sorted(source.iterdir()):
        if item.is_dir() and not item.is_symlink():
            copy_folder(item, target / item.name)
        else:
            with open_file(item) as file, open(target / item.name, "xb") as copy:
                shutil.copyfileobj(file, copy, MOST_BYTES)


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """All of a file that is not absurdly large."""
    with open_file(path) as file:
        return _all_of(file, plain(path), most)


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """All of a file of text in UTF-8."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise BadFile(f"{plain(path)} is not text in UTF-8: byte {error.start} is none.") from error


def _all_of(file: BinaryIO, name: str, most: int) -> bytes:
    try:
        found = file.read(most + 1)
    except OSError as error:
        raise BadFile(f"{name} cannot be read: {_reason(error)}.") from error
    if len(found) > most:
        raise BadFile(f"{name} is larger than {most:,} bytes.")
    return found


def _reason(error: BaseException) -> str:
    """What the system says, as the end of a sentence."""
    said = getattr(error, "strerror", None) or str(error)
    return str(said).rstrip(".")


# ------------------------------------------------------------------ JSON


def read_json(path: str | Path, schema: type[T], *, finite: bool = True) -> T:
    """What a file of JSON holds, once it fits the schema; `finite` refuses NaN and Infinity, which are no JSON."""
    with open_file(path) as file:
        return json_of(file, plain(path), schema, finite=finite)


def json_of(file: BinaryIO, name: str, schema: type[T], *, finite: bool = True) -> T:
    """The same of a file that is open already."""
    return parse_json(_all_of(file, name, MOST_BYTES), name, schema, finite=finite)


def parse_json(text: bytes | str, where: str, schema: type[T], *, finite: bool = True) -> T:
    """The same of a text; `where` it comes from begins the sentence about what is wrong with it."""
    refuse: dict[str, Any] = {"parse_constant": _no_number, "parse_float": _float} if finite else {}
    if re.search(rb"\d{19}", text.encode("utf-8", "replace") if isinstance(text, str) else text):
        refuse["parse_int"] = _int if finite else _int_or_float
    try:
        value = json.loads(text, **refuse)
    except UnicodeDecodeError as error:
        raise BadFile(f"{where} is not text in UTF-8: byte {error.start} is none.") from error
    except RecursionError as error:
        raise BadFile(f"{where} is nested too deep.") from error
    except ValueError as error:
        raise BadFile(f"{where} is not valid JSON: {_reason(error)}.") from error
    if _is_deep(value):
        raise BadFile(f"{where} is nested too deep.")
    conform(value, schema, where)
    return typing.cast(T, value)


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


def _float(word: str) -> float:
    value = float(word)
    return value if math.isfinite(value) else _no_number(word)


def _int(word: str) -> int:
    """A whole number that every reader can count with; JSON may hold one of a thousand digits."""
    value = int(word)
    if abs(value) >= 2**64:
        raise ValueError("it holds a whole number of more than 64 bits")
    return value


def _int_or_float(word: str) -> float:
    value = float(word)
    return int(word) if abs(value) < 2**64 else value


def _is_deep(value: Any) -> bool:
    """Whether lists and objects lie deeper inside one another than `DEEPEST`, found without recursion."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(DEEPEST):
        if not level:
            return False
        inner = (v for held in level for v in (held.values() if isinstance(held, dict) else held))
        level = [v for v in inner if isinstance(v, list | dict)]
    return bool(level)


# ------------------------------------------------------------------ JSON lines


def read_lines(
    path: str | Path,
    schema: type[T],
    *,
    finite: bool = True,
    growing: bool = False,
    bad: Callable[[BadFile], None] | None = None,
) -> Iterator[Line[T]]:
    """The lines of a file of JSON lines, once each fits the schema; empty ones are passed over.

    growing   the file is still written, or its writer was killed: a last line without its end is passed over
    bad       is told of each line that cannot be read, which is then passed over; without it the first one raises
    """
    with open_file(path) as file:
        yield from lines_of(file, plain(path), schema, finite=finite, growing=growing, bad=bad)


def lines_of(
    file: BinaryIO,
    name: str,
    schema: type[T],
    *,
    start: int = 0,
    finite: bool = True,
    growing: bool = False,
    bad: Callable[[BadFile], None] | None = None,
) -> Iterator[Line[T]]:
    """The same of a file that is open already, from a byte on; lines are then counted from there."""
    file.seek(start)
    number, end = 0, start
    while text := file.readline(MOST_BYTES + 1):
        number, begin, end = number + 1, end, end + len(text)
        if growing and not text.endswith(b"\n"):
            return
        if not text.strip():
            continue
        where = f"Line {number} of {name}"
        try:
            if len(text) > MOST_BYTES:
                raise BadFile(f"{where} is longer than {MOST_BYTES:,} bytes.")
            value = parse_json(text, where, schema, finite=finite)
        except BadFile as problem:
            if bad is None:
                raise
            bad(problem)
            continue
        yield Line(number, begin, end, value)


# ------------------------------------------------------------------ YAML


def parse_yaml(text: str, where: str) -> Any:
    """What YAML makes of a text. References are refused: a short text with them can stand for an endless value.

    How deep it is nested is seen before it is made, since the time PyYAML takes grows with the square of that.
    """
    import yaml

    if len(text) > 100_000:
        raise BadFile(f"{where} is longer than 100,000 letters.")
    depth = 0
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise BadFile(f"{where} uses references (*name), which are not allowed.")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise BadFile(f"{where} is nested too deep.")
        return yaml.safe_load(io.StringIO(text))
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise NotYaml(f"{where} is not valid YAML: {str(error).splitlines()[0].rstrip('.')}.") from error


# ------------------------------------------------------------------ tensors


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    open_file(path).close()
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError, OverflowError, OSError) as error:
        raise BadFile(f"{plain(path)} is not a whole safetensors file: {_reason(error)}.") from error


# ------------------------------------------------------------------ schemas


Misfit = tuple[str, str]
"""The field that does not fit, and what is wrong with it."""


def conform(value: Any, schema: Any, where: str) -> None:
    """Refuse a value that does not fit the schema, in a sentence that names the field."""
    wrong = _misfit(value, schema, "")
    if wrong is not None:
        field, clause = wrong
        raise BadFile(f"{where} cannot be used: {field or 'it'} {clause}.")


def brief(value: Any) -> str:
    """A value in a few letters, for a sentence."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    shown = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "…"


def _is(wanted: str, found: Any) -> str:
    return f"is {wanted}, not {brief(found)}"


def _misfit(value: Any, schema: Any, field: str) -> Misfit | None:
    """The first field that does not fit."""
    origin = typing.get_origin(schema)
    if schema is Any:
        return None
    if origin in (typing.Union, types.UnionType):
        wrongs = [_misfit(value, option, field) for option in typing.get_args(schema)]
        if None in wrongs:
            return None
        inside = [w for w in wrongs if w is not None and w[0] != field]
        return inside[0] if len(inside) == 1 else (field, _is(_named(schema), value))
    if typing.is_typeddict(schema):
        return _misfit_of_object(value, schema, field)
    if origin is list or schema is list:
        if not isinstance(value, list):
            return field, _is("a list", value)
        (inner,) = typing.get_args(schema) or (Any,)
        pairs = ((f"{field}[{i}]", v) for i, v in enumerate(value)) if inner is not Any else ()
        return _first(_misfit(v, inner, at) for at, v in pairs)
    if origin is dict or schema is dict:
        if not isinstance(value, dict):
            return field, _is("an object", value)
        inner = (typing.get_args(schema) or (str, Any))[1]
        return (
            _first(_misfit(v, inner, _below(field, k)) for k, v in value.items())
            if inner is not Any
            else None
        )
    return None if _is_plain(value, schema) else (field, _is(_named(schema), value))


def _misfit_of_object(value: Any, schema: Any, field: str) -> Misfit | None:
    if not isinstance(value, dict):
        return field, _is("an object", value)
    for name, wanted in _keys(schema).items():
        optional = typing.get_origin(wanted) is typing.NotRequired
        if name not in value:
            if optional:
                continue
            return field, f"lacks '{name}'"
        wrong = _misfit(value[name], typing.get_args(wanted)[0] if optional else wanted, _below(field, name))
        if wrong is not None:
            return wrong
    return None


def _keys(schema: Any) -> dict[str, Any]:
    return typing.get_type_hints(schema, include_extras=True)


def _first(wrongs: Iterator[Misfit | None]) -> Misfit | None:
    return next((w for w in wrongs if w is not None), None)


def _below(field: str, name: str) -> str:
    return f"{field}.{plain(name)}" if field else plain(name)


def _is_plain(value: Any, schema: Any) -> bool:
    if schema in (None, type(None)):
        return value is None
    if typing.get_origin(schema) is typing.Literal:
        return any(value == one and type(value) is type(one) for one in typing.get_args(schema))
    if schema is float:
        return is_number(value)
    if schema is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, schema)


def is_number(value: Any) -> bool:
    """Whether a value is a finite number: neither true nor false, nor too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _named(schema: Any) -> str:
    """A schema in words."""
    if typing.get_origin(schema) in (typing.Union, types.UnionType):
        words = [_named(option) for option in typing.get_args(schema)]
        return f"{', '.join(words[:-1])} or {words[-1]}"
    if typing.get_origin(schema) is typing.Literal:
        return " or ".join(f"'{one}'" for one in typing.get_args(schema))
    named = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
    named |= {type(None): "null"}
    if typing.get_origin(schema) is list:
        return "a list"
    return named.get(schema, "an object")
