"""The process that runs a user's reward function: JSON lines in, JSON lines out, nothing pickled.

Run as `python -m panoply.rewards.worker FILE.py NAME`. The function is called as TRL's are: with lists `prompts` and
`completions` and one list per further field of the data, and returns a list of numbers. It may be async.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class WrongLength(ValueError):
    """Not one reward a completion: no sample of the batch can be trusted."""


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
        raise ImportError(f"{file} has no function '{name}'")
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
        result = asyncio.run(_wait(result))
    expected = len(fields["completions"])
    values = [float(v) for v in result]
    if len(values) != expected:
        raise WrongLength(f"it returned {len(values)} rewards for {expected} completions")
    bad = [v for v in values if not math.isfinite(v)]
    if bad:
        raise ValueError(f"it returned {bad[0]}")
    return values


async def _wait(result: Any) -> Any:
    return await result


def main() -> None:
    file, name = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the function prints must not end up in the protocol
    try:
        function = load(file, name)
    except BaseException as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}", "fatal": True}), file=out, flush=True)
        return
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"values": call(function, json.loads(line))}
        except WrongLength as error:
            answer = {"error": str(error), "fatal": True}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
