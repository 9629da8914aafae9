"""What a script or notebook has defined, as a file that other processes can load without running the rest of it.

A part, a world or a reward function of the user's lives in this process alone. What it is made of is written down: its
source, the source of what it uses from the same script or cell, imports, and plain values by name. The file is kept
with the run, so that the run can be resumed, evaluated and compared elsewhere. Nothing is pickled, and nothing is
written of which a copy would not be the same: then one sentence says why, and what to do.
"""

from __future__ import annotations
import __future__ as futures

import ast
import builtins
import contextlib
import dis
import importlib.metadata
import inspect
import linecache
import math
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from panoply import parts, registry
from panoply.errors import PanoplyError
from panoply.files import BadFile, read_text
from panoply.parts import Part

if TYPE_CHECKING:
    from panoply.planning import Plan

TITLE = '"""Definitions of the session that made this run, written by panoply; loaded as a plug-in."""'
DEFINES = "# defines: "
FUTURE = "from __future__ import annotations"
LATER = futures.annotations.compiler_flag


class Unwritable(Exception):
    """Why something cannot be written to a file."""


# ------------------------------------------------------------------ what a plan needs


def plugins(plan: Plan) -> tuple[str, ...]:
    """The files beside those it names that a plan needs elsewhere; `Unwritable` where there can be none."""
    from panoply.given import keep

    named = {str(Path(p).resolve()) for p in plan.plugins}
    homeless: dict[str, Any] = {}
    files: dict[str, None] = {}
    for id, made in _made_of(plan):
        module = sys.modules.get(made.__module__)
        if made.__module__.split(".")[0] == "panoply" or made.__module__ in _installed():
            continue
        file = str(Path(str(getattr(module, "__file__", ""))).resolve())
        if file in named:
            continue
        if made.__module__.startswith("panoply_plugin_"):
            files[file] = None
        else:
            homeless[id] = made
    if homeless:
        text = _with_method(homeless, plan)
        if not any(_text(file) == text for file in named):
            files[str(keep(text, "definitions.py"))] = None
    return tuple(files)


def _with_method(homeless: dict[str, Any], plan: Plan) -> str:
    """The definitions a plan needs, and where it can be written the method's own, for those who want to look at it."""
    id = plan.method_id.partition("+")[0]
    known = registry.ENTRIES.get(id)
    if known is not None and known.build.__module__.split(".")[0] not in ("panoply", *_installed()):
        with contextlib.suppress(Unwritable):
            return definitions({**homeless, id: known.build})
    return definitions(homeless)


def missing(plan: Plan) -> str | None:
    """Why a plan cannot be carried out in another process, in one sentence; None where it can."""
    try:
        plugins(plan)
    except Unwritable as error:
        return f"{str(error)[0].upper()}{str(error)[1:]}: put it into a file and name that, plugins=[FILE]."
    return None


def _made_of(plan: Plan) -> Iterator[tuple[str, Any]]:
    """The functions and classes a plan is made of, with the names they are registered under."""
    waiting: list[Part] = [held for _, held in plan.method.parts()]
    while waiting:
        held = waiting.pop()
        if parts.registered(held.info.slot).get(held.info.key) is not type(held):
            raise PanoplyError(
                f"{held.info.id} was defined anew after this part had been made: make it again."
            )
        yield held.info.id, held.info.function
        waiting += [value for value in held.settings().values() if isinstance(value, Part)]
    yield plan.world_id, registry.find("world", plan.world_id).build


def _installed() -> set[str]:
    """Modules that every process finds by itself."""
    return {point.module for point in importlib.metadata.entry_points(group="panoply.plugins")}


# ------------------------------------------------------------------ a file of definitions


def definitions(wanted: dict[str, Any]) -> str:
    """A plug-in file that defines parts and worlds, given by the names they are registered under."""
    writer = _Writer()
    for id, made in sorted(wanted.items()):
        writer.add(made, id)
    return "\n".join([TITLE, DEFINES + ", ".join(sorted(wanted)), *writer.text()])


def function_file(function: Any, name: str) -> str:
    """A file that defines a function, of whose session nothing is changed by calling it elsewhere."""
    writer = _Writer(copies=False)
    writer.add(function, f"'{name}'")
    return "\n".join(writer.text())


def is_written(file: Path) -> bool:
    """Whether a file is one of definitions."""
    return _text(file).startswith(TITLE)


def is_here(file: Path) -> bool:
    """Whether what a file of definitions defines is there already, because this very session defines it."""
    text = _text(file)
    if not text.startswith(TITLE):
        return False
    here = {}
    for id in text.split("\n", 2)[1].removeprefix(DEFINES).split(", "):
        slot, _, name = id.partition(".")
        if slot in parts.SLOTS and name in parts.registered(slot):
            here[id] = parts.registered(slot)[name].info.function
        elif id in registry.ENTRIES:
            here[id] = registry.ENTRIES[id].build
    here = {id: made for id, made in here.items() if not made.__module__.startswith("panoply_plugin_")}
    if not here:
        return False
    try:
        same = definitions(here) == text
    except Unwritable:
        same = False
    if not same:
        raise PanoplyError(
            f"{', '.join(here)} is defined otherwise in this session than it was for that run: give one of them "
            "another name, or use a new session."
        )
    return True


def _text(file: str | Path) -> str:
    try:
        return read_text(file)
    except BadFile:
        return ""


class _Writer:
    """Collects what a definition uses, and what that uses, in the order in which it can be executed."""

    def __init__(self, copies: bool = True):
        self.copies = copies
        """Whether lists and dictionaries may be copied: what a reward function does to them would be lost."""
        self.imports: dict[str, None] = {}
        self.paths: dict[str, None] = {}
        self.values: list[str] = []
        self.blocks: list[tuple[tuple[str, int], str]] = []
        self.names: dict[str, Any] = {}
        self.future = False

    def text(self) -> list[str]:
        """Its lines."""
        paths = [f"sys.path.append({path!r})" for path in self.paths if path]
        head = [FUTURE, ""] if self.future else []
        sides = ["import sys", "", *paths, ""] if paths else []
        values = ["", *self.values] if self.values else []
        one_file = len({file for (file, _), _ in self.blocks}) == 1
        blocks = (
            sorted(self.blocks) if one_file else self.blocks
        )  # as they stood, where they may need one another
        return [*head, *sides, *self.imports, *values, *(f"\n\n{block}" for _, block in blocks), ""]

    def add(self, made: Any, who: str) -> None:
        """A function or class, by import where that finds it, else by its source."""
        made = inspect.unwrap(made) if callable(made) and not isinstance(made, type) else made
        name = getattr(made, "__name__", "")
        module = getattr(made, "__module__", None)
        if module not in (None, "__main__") and _found(module, name, made):
            self._reach(str(module))
            self.imports[f"from {module} import {name}"] = None
            return
        if name in self.names:
            if self.names[name] is not made:
                raise Unwritable(f"{who} uses two things that are both named '{name}'")
            return
        self.names[name] = made
        source, used, outside = _class_source(made, who) if isinstance(made, type) else _source(made, who)
        self.future |= any(f.__code__.co_flags & LATER for f in _functions(made))
        for word, chains in used.items():
            self._global(word, outside[word], chains, who)
        self.blocks.append((_place(made), source))

    def _global(self, word: str, value: Any, chains: Iterable[str], who: str) -> None:
        """What a global name stands for."""
        if isinstance(value, types.ModuleType):
            self._module(word, value, chains)
            return
        if isinstance(value, type) and issubclass(value, Part) and hasattr(value, "info"):
            made: Any = value.info.function
        else:
            made = value
        plain = inspect.unwrap(made) if callable(made) and not isinstance(made, type) else made
        module, name = getattr(plain, "__module__", None), getattr(plain, "__name__", None)
        if module not in (None, "__main__") and isinstance(name, str) and _found(module, name, value):
            self._reach(module)
            self.imports[f"from {module} import {name}" + (f" as {word}" if word != name else "")] = None
        elif isinstance(plain, types.FunctionType | type):
            if name != word:
                raise Unwritable(f"{who} uses '{word}', which is another name of '{name}'")
            self.add(made, who)
        elif self.names.get(word, value) is value and (written := _written(value, self.copies)) is not None:
            if word not in self.names:
                self.names[word] = value
                self.values.append(f"{word} = {written}")
        else:
            what = type(value).__name__
            raise Unwritable(
                f"{who} uses '{word}', {'an' if what[0] in 'aeiou' else 'a'} {what} of this session"
            )

    def _module(self, word: str, module: types.ModuleType, chains: Iterable[str]) -> None:
        if module.__name__ == "__main__":
            raise Unwritable("it uses the session as a module")
        self._reach(module.__name__)
        same = word == module.__name__
        self.imports[f"import {module.__name__}" + ("" if same else f" as {word}")] = None
        for chain in chains:  # `import xml.etree.ElementTree` binds `xml`
            dotted = module.__name__
            for piece in chain.split(".")[1:]:
                dotted += f".{piece}"
                if isinstance(sys.modules.get(dotted), types.ModuleType):
                    self.imports[f"import {dotted}"] = None

    def _reach(self, module: str) -> None:
        """Where other processes find a module that lies beside the script and not among the installed ones."""
        top = sys.modules.get(module.split(".")[0])
        file = getattr(top, "__file__", None) or next(iter(getattr(top, "__path__", [])), None)
        if file is None or module.split(".")[0] in (*sys.stdlib_module_names, "panoply"):
            return
        folder = Path(file).resolve().parent
        folder = folder.parent if hasattr(top, "__path__") and Path(file).name == "__init__.py" else folder
        if not any(part in ("site-packages", "dist-packages") for part in folder.parts):
            self.paths[str(folder)] = None


# ------------------------------------------------------------------ sources


Used = dict[str, list[str]]
"""Global names, with the dotted names that begin with them."""


def _found(module: Any, name: str, made: Any) -> bool:
    """Whether a module other processes can import has this under that name; a plug-in's file is not one."""
    if not isinstance(module, str) or module.startswith("panoply_plugin_") or module not in sys.modules:
        return False
    held = getattr(sys.modules[module], name, None)
    return held is not None and (
        held is made or getattr(getattr(held, "info", None), "function", None) is made
    )


def _source(made: Any, who: str) -> tuple[str, Used, dict[str, Any]]:
    if not isinstance(made, types.FunctionType):
        raise Unwritable(f"{who} is {_kind(made)}, not a function")
    if made.__name__ == "<lambda>":
        raise Unwritable(f"{who} is a lambda")
    if held := [name for name in vars(made) if not name.startswith("__")]:
        raise Unwritable(f"{who} has '{held[0]}' attached to it")
    if made.__code__.co_freevars:
        raise Unwritable(f"{who} uses '{made.__code__.co_freevars[0]}' of the function around it")
    try:
        source = textwrap.dedent(inspect.getsource(made))
        tree = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError) as error:
        raise Unwritable(f"the source of {who} cannot be read") from error
    if not isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef) or not _same(source, made.__code__):
        raise Unwritable(f"the file that {who} is written in was changed after it had been loaded")
    _check_stores(made.__code__, who)
    used = _names([*tree.decorator_list, tree.args, *([tree.returns] if tree.returns else [])])
    inside = _names(tree.body)
    for word in _globals(made.__code__):
        used.setdefault(word, []).extend(inside.get(word, []))
    return source.rstrip(), _known(used, made.__globals__), made.__globals__


def _class_source(made: type, who: str) -> tuple[str, Used, dict[str, Any]]:
    inside = _functions(made)
    files = [f.__code__.co_filename for f in inside if f.__module__ == made.__module__]
    if "<locals>" in made.__qualname__:
        raise Unwritable(f"{who} is defined inside of a function")
    lines = next((found for file in files if (found := linecache.getlines(file))), [])
    try:
        text = "".join(lines) or inspect.getsource(made)
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError) as error:
        raise Unwritable(f"the source of {who} cannot be read") from error
    named = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == made.__name__]
    if not named:
        raise Unwritable(f"the source of {who} cannot be read")
    node = named[-1]
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    source = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    outside = vars(sys.modules[made.__module__]) if made.__module__ in sys.modules else {}
    outside = next((f.__globals__ for f in inside if f.__module__ == made.__module__), outside)
    return source, _known(_names([node]), outside), outside


def _functions(made: Any) -> list[types.FunctionType]:
    if not isinstance(made, type):
        return [made] if isinstance(made, types.FunctionType) else []
    held = [getattr(v, "__func__", getattr(v, "fget", getattr(v, "func", v))) for v in vars(made).values()]
    return [v for v in held if isinstance(v, types.FunctionType) and v.__code__.co_filename != "<string>"]


def _place(made: Any) -> tuple[str, int]:
    """Where something is written: file and line."""
    codes = [f.__code__ for f in _functions(made)]
    return min(((c.co_filename, c.co_firstlineno) for c in codes), default=("", 0))


def _same(source: str, code: types.CodeType) -> bool:
    """Whether a source is that of this code: a file may have changed since it was loaded."""
    whole = compile(source, "<source>", "exec", flags=code.co_flags & LATER, dont_inherit=True)
    waiting = [whole]
    while waiting:
        found = waiting.pop()
        if found.co_name == code.co_name and _essence(found) == _essence(code):
            return True
        waiting += [c for c in found.co_consts if isinstance(c, types.CodeType)]
    return False


def _essence(code: types.CodeType) -> list[tuple[str, Any]]:
    """What code does, without how methods are called, which depends on the imports around it."""
    calls = (
        "LOAD_METHOD",
        "LOAD_ATTR",
        "PUSH_NULL",
        "PRECALL",
        "CALL",
        "CALL_KW",
        "KW_NAMES",
        "NOP",
        "CACHE",
    )
    return [
        (i.opname, "code" if isinstance(i.argval, types.CodeType) else i.argval)
        for inner in _codes(code)
        for i in dis.get_instructions(inner)
        if i.opname not in calls and "JUMP" not in i.opname and i.opname != "FOR_ITER"
    ]


def _check_stores(code: types.CodeType, who: str) -> None:
    """A function that changes globals of its session would change a copy of them elsewhere."""
    for inner in _codes(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise Unwritable(f"{who} changes '{instruction.argval}' of this session")


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for held in code.co_consts:
        if isinstance(held, types.CodeType):
            yield from _codes(held)


def _globals(code: types.CodeType) -> Iterator[str]:
    for inner in _codes(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield str(instruction.argval)


def _names(nodes: Sequence[ast.AST]) -> Used:
    """Names, also those in annotations that are written as text, and the dotted names that begin with them."""
    found: Used = {}
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Name):
            found.setdefault(node.id, [])
        elif isinstance(node, ast.Attribute):
            pieces, at = [node.attr], node.value
            while isinstance(at, ast.Attribute):
                pieces, at = [at.attr, *pieces], at.value
            if isinstance(at, ast.Name):
                found.setdefault(at.id, []).append(".".join([at.id, *pieces]))
        for text in (getattr(node, field, None) for field in ("annotation", "returns")):
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                try:
                    found |= {k: v for k, v in _names([ast.parse(text.value)]).items() if k not in found}
                except SyntaxError:
                    continue
    return found


def _known(used: Used, outside: dict[str, Any]) -> Used:
    return {word: chains for word, chains in used.items() if word in outside and not _builtin(word, outside)}


def _builtin(word: str, outside: dict[str, Any]) -> bool:
    return hasattr(builtins, word) and outside[word] is getattr(builtins, word)


def _written(value: Any, copies: bool) -> str | None:
    """A plain value as Python writes it; None where it is not plain."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    if type(value) is tuple or (copies and type(value) is list):
        inner = [_written(v, copies) for v in value]
        if any(v is None for v in inner):
            return None
        text = ", ".join(map(str, inner))
        return f"[{text}]" if type(value) is list else f"({text}{',' if len(inner) == 1 else ''})"
    if copies and type(value) is dict:
        pairs = [(_written(k, copies), _written(v, copies)) for k, v in value.items()]
        if any(k is None or v is None for k, v in pairs):
            return None
        return "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
    return None


def _kind(made: Any) -> str:
    name = type(made).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
