"""What runs a user's reward function inside a confined process.

The function is called as TRL's are: with lists `prompts` and `completions` and one list per further field of the data,
and returns a list of numbers. It may be async.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from panoply.errors import nearest


class WrongLength(ValueError):
    """Not one reward a completion: no sample of the batch can be trusted."""


def serve(file: str, name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The function, as a confined process wants it: fields in, `values` out."""
    function = load(file, name)

    def answer(fields: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"values": call(function, fields)}
        except WrongLength as error:
            return {"error": str(error), "fatal": True}

    return answer


def load(file: str, name: str) -> Callable[..., Any]:
    path = Path(file).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__
        ]
        near = nearest(name, own)
        hint = f"; did you mean '{near[0]}'?" if near else f"; it has {', '.join(own[:8])}" if own else ""
        raise ImportError(f"{file} has no function '{name}'{hint}")
    return found  # type: ignore[no-any-return]


def accepted(function: Callable[..., Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The fields a function asks for by name, or all of them if it takes any."""
    parameters = inspect.signature(function).parameters
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return fields
    return {name: value for name, value in fields.items() if name in parameters}


def call(function: Callable[..., Any], fields: dict[str, Any]) -> list[float]:
    """Rewards of a batch, checked: one finite number each."""
    given = accepted(function, fields)
    result = function(**given)
    if inspect.isawaitable(result):
        result = _awaited(result)
    expected = len(fields["completions"])
    values = [float(v) for v in result]
    if len(values) != expected:
        raise WrongLength(f"it returned {len(values)} rewards for {expected} completions")
    bad = [v for v in values if not math.isfinite(v)]
    if bad:
        raise ValueError(f"it returned {bad[0]}")
    return values


def _awaited(result: Any) -> Any:
    """What an async function gives; in a notebook, whose own loop is running, from a thread beside it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_wait(result))
    with ThreadPoolExecutor(1) as beside:
        return beside.submit(asyncio.run, _wait(result)).result()


async def _wait(result: Any) -> Any:
    return await result
