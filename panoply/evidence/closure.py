"""Which files of the package a run computes with: what its parts, its world and the loops import, directly or not.

Read from the source and not from what happens to be loaded, so that it is the same in every process. Imports inside of
functions count; those for type checkers alone do not.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import panoply

PACKAGE = Path(panoply.__file__).parent
SILENT = ("cli", "commands", "evidence", "progress", "report", "scale", "sinks", "ui")
"""What only shows or asks, and does not compute; and what computes the same elsewhere."""


def closure(modules: Iterable[str]) -> list[Path]:
    """The files of these modules and of all that they import of the package, in order."""
    waiting, found = [*modules], set[str]()
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imports(module)
    return sorted(path for module in found if (path := source(module)) is not None)


@functools.cache
def imports(module: str) -> frozenset[str]:
    """The package's modules that a module's source imports."""
    path = source(module)
    if path is None:
        return frozenset()
    parents = (module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1))
    named = {name for node in _statements(ast.parse(path.read_bytes())) for name in _named(node)}
    return frozenset(name for name in {*parents, *named} - {module} if source(name) is not None)


@functools.cache
def source(module: str) -> Path | None:
    """The file of a module of the package; None of what is silent, and of anything else."""
    top, *rest = module.split(".")
    if top != PACKAGE.name or (rest and rest[0] in SILENT):
        return None
    place = PACKAGE.joinpath(*rest)
    return next((p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()), None)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those below `if TYPE_CHECKING:`."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        hidden = (
            isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        )
        waiting += node.orelse if hidden and isinstance(node, ast.If) else ast.iter_child_nodes(node)


def _named(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
