"""What runs a user's tools inside a confined process."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

from panoply.rewards.worker import _awaited, load
from panoply.tools.schema import schema_of

MOST = 20_000
"""Characters of a result; the rest is cut off."""


def serve(sources: Sequence[Sequence[str]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Questions in, answers out: `schemas`, or a call by name with its arguments."""
    functions = {name: load(file, name) for file, name in sources}
    schemas = [schema_of(function) for function in functions.values()]

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if "call" not in asked:
            return {"schemas": schemas}
        result = functions[asked["call"]](**asked["arguments"])
        if inspect.isawaitable(result):
            result = _awaited(result)
        return {"result": _text(result)[:MOST]}

    return answer


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result.encode("utf-8", "replace").decode()
    try:
        return json.dumps(result)
    except (TypeError, ValueError):
        return str(result)
