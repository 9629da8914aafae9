"""A user's reward function in a sandbox (`--sandbox`): for those that run what a model wrote, or that nobody has read.

The function's file is loaded anew for every batch, by a program that gets the fields as input and prints the values.
The packages it imports are loaded before; files beside it are not there, nor is a network. What a sandbox cannot keep
apart is the function and the code that it runs itself: one that executes an answer lets it write its own reward.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from panoply.confined.process import Asked, Failed, TookTooLong
from panoply.errors import PanoplyError
from panoply.rewards.functions import Fields, RewardFunction
from panoply.sandbox import Limits, Program, Result, Wanted

NEEDS = frozenset({"python", "stdin"})
OUTPUT = 8 * 2**20
"""Bytes that a function may print, its values included."""
HARNESS = """
import inspect, json, sys, types
order = json.loads(sys.stdin.read())
module = types.ModuleType(order["module"])
exec(compile(order["source"], order["module"] + ".py", "exec"), vars(module))
function = vars(module).get(order["name"])
if not callable(function):
    raise ImportError("it has no function '" + order["name"] + "'")
fields, values = order["fields"], []
if fields is not None:
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind == p.VAR_KEYWORD for p in parameters):
        fields = {p.name: fields[p.name] for p in parameters if p.name in fields}
    values = function(**fields)
    if inspect.isawaitable(values):
        try:
            values.send(None)
        except StopIteration as end:
            values = end.value
        else:
            raise RuntimeError("it waits for something, and in a sandbox nothing ever comes")
print()
print(order["mark"] + json.dumps([float(value) for value in values]))
"""


def imported(source: str) -> tuple[str, ...]:
    """The installed packages that a file imports by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    outside = sorted(found - sys.stdlib_module_names)
    return tuple(name for name in outside if importlib.util.find_spec(name) is not None)


def wanted(sandbox: str, sources: tuple[str, ...]) -> Wanted:
    """The sandbox that functions (`FILE.py:NAME`) ask for."""
    packages: set[str] = set()
    for source in sources:
        file = Path(source.rpartition(":")[0])
        try:
            packages |= set(imported(file.read_text()))
        except (OSError, SyntaxError, ValueError):
            continue  # who calls it says why
    return Wanted(sandbox, NEEDS, tuple(sorted(packages)))


class WalledFunction(RewardFunction):
    """Called with batches like the others; samples on which it fails get None."""

    def __init__(self, source: str, seconds: float, memory: float, asked: Wanted):
        file, separator, self.name = source.rpartition(":")
        if not separator or not Path(file).is_file():
            raise PanoplyError(
                f"A reward function is FILE.py:NAME, and '{source}' names no file that exists."
            )
        self.source, self.seconds, self._memory = source, seconds, memory
        self.say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
        self.failures = {}
        self._told, self._breakdowns = set(), 0
        self._module, self._code = Path(file).stem, Path(file).read_text()
        self._box = asked.find()
        self._allowed = Limits(min(seconds, 3600.0), int(memory * 2**30) or 2**40, OUTPUT)
        result = self._box.run_many([self._program(None, "")])[0]
        if not result.ok:
            raise PanoplyError(f"The reward function {source} cannot be used: {_why(result, seconds)}.")

    def close(self) -> None:
        """The sandbox is everybody's."""

    def begin(self, fields: Fields) -> Asked:
        return _Run(self, fields)

    def values(self, fields: Fields) -> list[dict[str, Any] | Failed]:
        """What the function gives for these fields, as one batch."""
        return self._asked([fields])

    def _one_by_one(self, fields: Fields) -> list[float | None]:
        number = len(fields["completions"])
        ones = [{name: [column[i]] for name, column in fields.items()} for i in range(number)]
        found: list[float | None] = []
        for answer in self._asked(ones):
            try:
                found += self._values(_Known(answer), 1)
            except Failed as error:
                self._lose(error)
                found.append(None)
        return found

    def _asked(self, batches: list[dict[str, list[Any]]] | list[Fields]) -> list[dict[str, Any] | Failed]:
        mark = f"#{secrets.token_hex(8)}#"
        results = self._box.run_many([self._program(fields, mark) for fields in batches])
        return [
            _answer(result, mark, len(fields["completions"]), self.seconds)
            for result, fields in zip(results, batches, strict=True)
        ]

    def _program(self, fields: Fields | None, mark: str) -> Program:
        order = {
            "source": self._code,
            "module": self._module,
            "name": self.name,
            "mark": mark,
            "fields": None if fields is None else {name: list(column) for name, column in fields.items()},
        }
        return Program(HARNESS, stdin=json.dumps(order), limits=self._allowed)

    def _explained(self, why: str) -> str:
        if why.startswith("MemoryError") and self._memory:
            return f"{why} (it may take {self._memory:g} GiB: world.memory raises that)"
        return why


class _Run(Asked):
    """A call that is made when its result is asked for."""

    def __init__(self, function: WalledFunction, fields: Fields):
        self.function, self.fields = function, fields

    @property
    def done(self) -> bool:
        return True

    def result(self) -> dict[str, Any]:
        return _Known(self.function.values(self.fields)[0]).result()


class _Known(Asked):
    """An answer that is here already."""

    def __init__(self, answer: dict[str, Any] | Failed):
        self.answer = answer

    def result(self) -> dict[str, Any]:
        if isinstance(self.answer, Failed):
            raise self.answer
        return self.answer


def _answer(result: Result, mark: str, number: int, seconds: float) -> dict[str, Any] | Failed:
    """Values that are checked, an error of the function's, or that it hung or died."""
    if result.ended == "time":
        return TookTooLong(_why(result, seconds))
    if result.ended:
        return Failed(_why(result, seconds))
    lines = [line for line in result.said.splitlines() if line.startswith(mark)]
    if not result.ok or not lines:
        return {"error": _why(result, seconds)}
    values = json.loads(lines[-1].removeprefix(mark))
    if len(values) != number:
        return {"error": f"it returned {len(values)} rewards for {number} completions", "fatal": True}
    bad = [value for value in values if not math.isfinite(value)]
    return {"error": f"ValueError: it returned {bad[0]}"} if bad else {"values": values}


def _why(result: Result, seconds: float) -> str:
    """In a phrase."""
    if result.ended:
        words = {"time": f"it took longer than {seconds:g} s", "output": "it printed too much"}
        return words.get(result.ended, "its process died")
    lines = result.said.strip().splitlines()
    return lines[-1][:1000] if lines and result.exit else "it left without an answer"
