"""The API reference, from signatures and docstrings: `python -m panoply.report.reference > docs/api.md`."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import panoply
from panoply import registry
from panoply.lora import Lora
from panoply.parts import SLOTS, Part, kind, show_value
from panoply.planning import Options
from panoply.ranges import ANY, merged
from panoply.report import meanings

MODULES = [f"panoply.{name}" for name in (
    "experience", "batch", "parts", "method_base", "regimes", "recipes", "registry", "worlds.world", "worlds.episodic",
    "rollout.collector", "rollout.text", "rollout.engine", "policies.text", "policies.taps", "policies.tokenizer",
)]  # fmt: skip
"""What a part, method or world is written with, beside the names of `panoply` itself."""
INTRODUCTION = """# Reference

Made from the code by `make docs`: the [names of `panoply`](#panoply), the [modules](#panoplyexperience) that parts,
methods and worlds are written with, the [settings of a run](#settings-of-a-run), and all
[methods](#methods-and-recipes), [worlds](#worlds) and [parts](#parts) with their settings.
`panoply show NAME` prints one of them at length.
"""


def page() -> str:
    """The whole reference as Markdown."""
    pieces = [INTRODUCTION, *_names(), *(piece for name in MODULES for piece in _module(name))]
    return "\n".join([*pieces, *_methods(), *_worlds(), *_parts()]).rstrip() + "\n"


def _names() -> Iterator[str]:
    yield "## panoply\n"
    values = {name: getattr(panoply, name) for name in panoply.__all__}
    below = {name: value.__module__ for name, value in values.items() if value.__module__ in MODULES}
    yield from (f"- `{name}`: see [{home}](#{home.replace('.', '')})" for name, home in below.items())
    yield ""
    for name in (n for n in values if n not in below):
        yield from _entry(name, values[name])


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield f"## {name}\n\n{prose(module)}"
    for own, value in vars(module).items():
        made_here = getattr(value, "__module__", "") == name
        if made_here and not own.startswith("_") and (inspect.isclass(value) or inspect.isfunction(value)):
            yield from _entry(own, value)


def _entry(name: str, value: Any) -> Iterator[str]:
    """A function, or a class with its public methods."""
    yield f"### {name}\n\n```python\n{signature(name, value)}\n```\n\n{prose(value)}"
    for own, member in vars(value).items() if inspect.isclass(value) else ():
        held = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
        if own.startswith("_") or not inspect.isfunction(held):
            continue
        plain = isinstance(member, property | functools.cached_property)
        shown = f"{own}: {held.__annotations__.get('return')}" if plain else signature(own, held, width=9999)
        about = (inspect.getdoc(held) or "").split("\n\n")[0].replace("\n", " ")
        yield f"- `{shown}`" + (f"  \n  {about}" if about else "")
    yield ""


def signature(name: str, value: Any, width: int = 100) -> str:
    """`name(a: int, *, b: str = "x") -> str`, one argument a line where it is long."""
    try:
        found = inspect.signature(value)
    except ValueError:
        return name
    words: list[str] = []
    for p in found.parameters.values():
        if p.name in ("self", "cls") or p.name.startswith("_"):
            continue
        if p.kind is p.KEYWORD_ONLY and not any(w.startswith("*") for w in words):
            words.append("*")
        stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        kind = "" if p.annotation is p.empty else f": {p.annotation}"
        shown = "…" if repr(p.default).startswith("<") else repr(p.default)
        words.append(f"{stars}{p.name}{kind}" + ("" if p.default is p.empty else f" = {shown}"))
    arrow = f" -> {found.return_annotation}" if isinstance(found.return_annotation, str) else ""
    line = f"{name}({', '.join(words)}){arrow}"
    return line if len(line) <= width else f"{name}(\n    " + ",\n    ".join(words) + f",\n){arrow}"


def prose(value: Any) -> str:
    """A docstring as Markdown; paragraphs laid out by hand stay as they are."""
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value) and text.startswith(f"{value.__name__}("):
        return ""  # what a dataclass writes about itself says no more than the signature
    paragraphs = [f"```text\n{p}\n```" if "   " in p or "\n  " in p else p for p in text.split("\n\n")]
    return "\n\n".join(paragraphs) + "\n" if text else ""


def _table(*rows: Iterable[str]) -> str:
    head, *rest = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in rows]
    return "\n".join([head, f"|{'---|' * (head.count('|') - 1)}", *rest]) + "\n"


def _fields(cls: Any) -> str:
    """The fields of a dataclass, with what stands in quotes below each."""
    notes, hints, bounds = meanings.of_fields(cls), typing.get_type_hints(cls), merged(cls)
    rows = (
        (
            f"`{f.name}`",
            kind(hints[f.name], bounds.get(f.name)),
            f"`{show_value(f.default) or '–'}`",
            notes.get(f.name, ""),
        )
        for f in sorted(dataclasses.fields(cls), key=lambda f: bool(f.kw_only))
    )
    return _table(("setting", "takes", "default", ""), *rows)


def _methods() -> Iterator[str]:
    yield f"## Settings of a run\n\n`--set run.NAME=VALUE`; the common ones are options too.\n\n{_fields(Options)}"
    yield f"## Settings of adapters\n\n`--set lora.NAME=VALUE`, with `--lora RANK`.\n\n{_fields(Lora)}"
    every = [*registry.entries("method"), *registry.entries("recipe")]
    found = [e for e in every if e.build.__module__.startswith("panoply.")]
    rows = [
        (f"`{e.id}`", e.family or "", e.base or "", " ".join(e.doc.split("\n\n")[0].split())) for e in found
    ]
    yield f"## Methods and recipes\n\n{_table(('method', 'family', 'base', ''), *rows)}"


def _worlds() -> Iterator[str]:
    yield "## Worlds\n\n`--set world.NAME=VALUE`\n"
    for entry in registry.entries("world"):
        if entry.build.__module__.startswith("panoply."):
            yield f"### {entry.id}\n\n{prose(entry.build)}\n{_fields(entry.build)}"


def _parts() -> Iterator[str]:
    yield "## Parts\n\n`--set SLOT.NAME=VALUE`, where a slot takes several parts `--set SLOT.PART.NAME=VALUE`\n"
    for slot in SLOTS:
        found = [c for _, c in sorted(registry.parts(slot).items()) if c.__module__.startswith("panoply.")]
        rows = [(f"`{c.info.key}`", _settings(c), c.info.summary) for c in found]
        called = f"Called with `({', '.join(SLOTS[slot].takes)})`; returns {SLOTS[slot].returns}."
        yield f"### {slot}\n\n{called}\n\n{_table(('part', 'settings', ''), *rows)}"


def _settings(cls: type[Part]) -> str:
    """Each setting with its default, and with its range where it has one."""
    shown = []
    for name in cls.annotations():
        default = f"={show_value(getattr(cls, name))}" if hasattr(cls, name) else ""
        bound = cls.info.bounds.get(name, ANY)
        shown.append(f"`{name}{default}`" + (f" ({bound})" if bound != ANY else ""))
    return ", ".join(shown)


if __name__ == "__main__":
    print(page(), end="")
