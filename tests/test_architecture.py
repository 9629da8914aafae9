"""What may know what: rules of the map in docs/architecture.md that a reader relies on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.walk import walk

PACKAGE = Path(__file__).parent.parent / "panoply"
FILES = sorted(PACKAGE.rglob("*.py"))
ASKED = {
    "Method", "OnPolicy", "OffPolicy", "Offline", "Dataset", "Several", "Policy", "TextPolicy", "ControlPolicy",
    "ValueModel", "TextWorld", "ControlWorld", "Logged", "Episodic",
}  # fmt: skip


def asks(file: Path) -> list[int]:
    """Lines that ask whether something is a method, policy or world of some class."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            named = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
            named |= {n.attr for n in ast.walk(node.args[1]) if isinstance(n, ast.Attribute)}
            found += [node.lineno] if named & ASKED else []
    return found


def test_only_kinds_ask_which_class_a_method_a_policy_or_a_world_has() -> None:
    """Others ask them what they can do, so that a plug-in's own classes do as well."""
    assert asks(PACKAGE / "kinds/__init__.py"), "nothing is found any more"
    others = {str(f.relative_to(PACKAGE)): asks(f) for f in FILES if "kinds" not in f.parts}
    assert {name: lines for name, lines in others.items() if lines} == {}


@pytest.mark.parametrize(("below", "above"), [("worlds", "loops"), ("policies", "loops")])
def test_imports_point_one_way(below: str, above: str) -> None:
    wrong = []
    for file in (PACKAGE / below).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            wrong += [f"{file.name}: {n}" for n in named if n.startswith(f"panoply.{above}")]
    assert wrong == []


@pytest.mark.parametrize(
    ("method", "world", "most"), [("grpo", "chain", 36), ("sac", "pendulum", 19), ("dpo", "chain", 24)]
)
def test_one_step_can_be_followed(method: str, world: str, most: int) -> None:
    """The files that a reader of one step crosses: what is added to it takes something else away."""
    assert len(walk(method, world)) <= most
