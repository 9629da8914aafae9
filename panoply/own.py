"""The user's own: a data file and reward functions become a world."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from panoply import registry
from panoply.errors import PanoplyError, unknown
from panoply.which import model_folder


def is_data_file(data: Any) -> bool:
    """Whether `--data` names a file and not a part."""
    return isinstance(data, str) and data.endswith((".jsonl", ".json"))


def own_data(world: str | None, choices: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """A data file and reward functions as the world `jsonl`, or the choices as they are."""
    found = dict(choices)
    named = found.get("reward") or []
    named = [named] if isinstance(named, str) else list(named)
    functions = [word for word in named if isinstance(word, str) and ".py" in word]
    for word in functions:
        _check_function(word)
    data = found.get("data")
    if isinstance(data, str) and not is_data_file(data) and ("." in data or os.path.sep in data):
        raise PanoplyError(f"--data takes FILE.jsonl, with one JSON object a line; '{data}' is not one.")
    if not (isinstance(data, str) and is_data_file(data)):
        if functions:
            raise PanoplyError(
                "A reward function judges answers to your own prompts: name them with --data FILE.jsonl."
            )
        if len(named) > 1:
            raise PanoplyError("Only reward functions, FILE.py:NAME, can be several.")
        return world, {**found, "reward": named[0]} if named else found
    if world not in ("jsonl", "jsonl@1", None):
        raise PanoplyError(f"--data {data} is a world of its own: leave --world {world} out.")
    if not found.get("model"):
        raise PanoplyError("Your own data needs a model of your own: name its folder with --model.")
    split = [word.rpartition("=") if "=" in word else (word, "", "1") for word in functions]
    try:
        weights = tuple(float(weight) for _, _, weight in split)
    except ValueError as error:
        raise PanoplyError("A reward's weight is a number: --reward FILE.py:NAME=0.5.") from error
    made = {
        "world.data": os.path.abspath(data),
        "world.model": str(model_folder(found["model"]).resolve()),
        "world.rewards": tuple(os.path.abspath(source) for source, _, _ in split),
        "world.weights": weights,
    }
    others = [word for word in named if word not in functions]
    known = {*registry.parts("reward"), *(e.name for e in registry.entries("method"))} if others else set()
    for word in others:
        if isinstance(word, str) and word.split("@")[0] not in known:
            raise PanoplyError(f"Unknown reward '{word}'. A function of yours is named FILE.py:NAME.")
    kept = {k: v for k, v in found.items() if k not in ("data", "reward")}
    return "jsonl", {
        **kept,
        "reward": others[0] if others else None,
        "settings": {**made, **(found.get("settings") or {})},
    }


def _check_function(word: str) -> None:
    """Refuse what is not FILE.py:NAME[=WEIGHT] of a function that is there. The file is looked at, and not run."""
    file, separator, rest = word.partition(".py")
    file, name = file + separator, rest.removeprefix(":").split("=")[0]
    if not os.path.isfile(file):
        beside = [p.name for p in Path(file).parent.glob("*.py")] if Path(file).parent.is_dir() else []
        raise unknown("file of a reward function", file, beside)
    functions, bound = _names(file)
    if not name or not rest.startswith(":"):
        such = f", such as {file}:{functions[0]}" if functions else ""
        has = f" {file} has {', '.join(functions[:8])}." if len(functions) > 1 else ""
        raise PanoplyError(f"A reward function is named FILE.py:NAME{such}.{has}")
    if bound is not None and name not in bound:
        raise unknown(f"function of {file}", name, functions)


def _names(file: str) -> tuple[list[str], set[str] | None]:
    """The functions of a file, and all names it binds, if that can be told without running it."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return [], None  # what is wrong with it is said when it is loaded
    made = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [n.name for n in tree.body if isinstance(n, made) and not n.name.startswith("_")]
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            bound.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, (*made, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.Name):
            bound.add(node.id)
    return functions, None if "*" in bound else bound
