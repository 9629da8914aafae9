"""A typed Python function as a tool: its schema from signature and docstring, and arguments checked against it.

The form is OpenAI's, which TRL, verifiers and chat templates share:

    {"type": "function", "function": {"name", "description", "parameters": {"type", "properties", "required"}}}
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class NoTool(ValueError):
    """A function that cannot be a tool; the message says what it lacks."""


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """What a model is told of a function: its name, the docstring's first paragraph, and each argument's type and line
    under `Args:`."""
    name = function.__name__
    doc = inspect.getdoc(function) or ""
    if not doc.strip():
        raise NoTool(f"{name} has no docstring, which tells the model what it is for")
    hints = typing.get_type_hints(function)
    said = _said_of_arguments(doc)
    properties: dict[str, Any] = {}
    required = []
    for argument, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise NoTool(f"{name} takes {parameter}, and a tool's arguments are given by name")
        if argument not in hints:
            raise NoTool(f"the argument {argument} of {name} has no type")
        properties[argument] = _type(hints[argument], f"the argument {argument} of {name}")
        if argument in said:
            properties[argument]["description"] = said[argument]
        if parameter.default is parameter.empty:
            required.append(argument)
    about = " ".join(re.split(r"\n\s*\n|\n\s*Args:", doc)[0].split())
    parameters = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _said_of_arguments(doc: str) -> dict[str, str]:
    """The lines under `Args:`, by argument."""
    block = re.search(r"^\s*Args:\s*\n(.*?)(?=^\s*(?:Returns|Raises|Examples?|Yields):|\Z)", doc, re.M | re.S)
    if not block:
        return {}
    found = re.findall(
        r"^\s*(\w+)\s*(?:\([^)\n]*\))?:\s*(.*?)(?=^\s*\w+\s*(?:\([^)\n]*\))?:|\Z)", block[1], re.M | re.S
    )
    return {name: " ".join(text.split()) for name, text in found}


def _type(hint: Any, of: str) -> dict[str, Any]:
    """A type as JSON Schema has it."""
    if hint in PLAIN:
        return {"type": PLAIN[hint]}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        kinds = {type(value) for value in inner}
        if len(kinds) == 1 and (kind := kinds.pop()) in (str, int, float, bool):
            return {"type": PLAIN[kind], "enum": list(inner)}
    if origin in (Union, types.UnionType):
        some = [_type(one, of) for one in inner if one is not type(None)]
        made = some[0] if len(some) == 1 else {"anyOf": some}
        return {**made, "nullable": True} if type(None) in inner else made
    if origin is list:
        return {"type": "array", "items": _type(inner[0], of)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(inner[1], of)}
    raise NoTool(f"{of} is a {hint}: there is room for str, int, float, bool, list, dict, Literal and None")


def wrong_with(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a call, in words; nothing where all is well."""
    properties = parameters["properties"]
    for name in arguments:
        if name not in properties:
            return f"there is no argument '{name}'; there is {', '.join(properties) or 'none'}"
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"the argument '{name}' is missing"
    for name, value in arguments.items():
        if not _fits(value, properties[name]):
            return f"the argument '{name}' is {_wanted(properties[name])}, not {value!r:.80}"
    return ""


def _fits(value: Any, kind: Mapping[str, Any]) -> bool:
    if value is None:
        return bool(kind.get("nullable"))
    if "anyOf" in kind:
        return any(_fits(value, one) for one in kind["anyOf"])
    wanted = kind["type"]
    if isinstance(value, bool) or wanted == "boolean":
        return isinstance(value, bool) and wanted == "boolean"
    if wanted == "number":
        return isinstance(value, int | float)
    if wanted == "array":
        return isinstance(value, list) and all(_fits(one, kind["items"]) for one in value if "items" in kind)
    right = isinstance(value, {"string": str, "integer": int, "object": dict}[wanted])
    return right and ("enum" not in kind or value in kind["enum"])


def _wanted(kind: Mapping[str, Any]) -> str:
    if "enum" in kind:
        return f"one of {', '.join(map(repr, kind['enum']))}"
    return (
        " or ".join(_wanted(one) for one in kind["anyOf"]) if "anyOf" in kind else f"of type {kind['type']}"
    )
