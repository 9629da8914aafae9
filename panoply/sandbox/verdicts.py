"""Whether a function that a model wrote gives what it should, decided outside of the sandbox.

    calls = Calls(code, "double", [[1], [21]])         # what goes in: the program, and arguments
    result = box.run_many([calls.program])[0]
    calls.verdicts(result, [2, 42])                     # [True, True]; what is expected has never been inside

The program and a harness behind it share one process, so a program can print whatever the harness would. It gains
nothing: to be right it must print the right values, and those are nowhere in its reach. Leaving early, an `__eq__` that
is always true or a patched `json` leave values out or wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from panoply.sandbox.contract import USUAL, Limits, Program, Result

HARNESS = """

def _harness_of_panoply():
    import json
    for arguments in json.loads({cases}):
        try:
            said = "=" + json.dumps({function}(*arguments))
        except Exception as problem:
            said = "!" + type(problem).__name__ + ": " + str(problem)
        print("\\n" + {mark} + said)
_harness_of_panoply()
"""


@dataclass(frozen=True)
class Value:
    """What a call gave: data as JSON has it, or why there is none."""

    data: Any = None
    error: str = ""


@dataclass(frozen=True)
class Calls:
    """A function of a program, called with one list of arguments after another."""

    code: str
    function: str
    cases: Sequence[Sequence[Any]]
    limits: Limits = USUAL

    @property
    def mark(self) -> str:
        """What begins the harness's lines, so that a program's own do not stand in the way. It is no secret."""
        body = json.dumps([self.code, self.function, self.cases])
        return f"#{hashlib.sha256(body.encode()).hexdigest()[:16]}#"

    @property
    def program(self) -> Program:
        """The code with a harness behind it."""
        if not self.function.isidentifier():
            raise ValueError(f"a function has a name, not '{self.function[:40]}'")
        filled = HARNESS.format(
            cases=repr(json.dumps(self.cases)), function=self.function, mark=repr(self.mark)
        )
        return Program(self.code + filled, limits=self.limits)

    def values(self, result: Result) -> list[Value]:
        """What the calls gave, one each; those after the program's end have none."""
        lines = [line for line in result.said.splitlines() if line.startswith(self.mark)]
        found = [_value(line.removeprefix(self.mark)) for line in lines[: len(self.cases)]]
        why = {"time": "it took too long", "output": "it printed too much"}.get(result.ended, "")
        missing = Value(error=why or _last(result.said) or "it left without an answer")
        return found + [missing] * (len(self.cases) - len(found))

    def verdicts(self, result: Result, expected: Sequence[Any]) -> list[bool]:
        """Which calls gave what is expected, as JSON has it; numbers to one part in a billion."""
        found = self.values(result)
        return [
            not value.error and same(value.data, json.loads(json.dumps(wanted)))
            for value, wanted in zip(found, expected, strict=True)
        ]


def same(given: Any, wanted: Any) -> bool:
    """Equal data of equal kinds: 1 is no True, and 0.1 + 0.2 is 0.3."""
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, int | float) and isinstance(wanted, int | float):
        if isinstance(given, int) and isinstance(wanted, int):
            return given == wanted
        return _close(given, wanted)
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(same, given, wanted))
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(same(given[key], wanted[key]) for key in wanted)
    return type(given) is type(wanted) and bool(given == wanted)


def _close(given: float, wanted: float) -> bool:
    try:
        return math.isclose(given, wanted, rel_tol=1e-9, abs_tol=1e-12)
    except OverflowError:  # an integer beyond all floats
        return False


def _value(said: str) -> Value:
    if not said.startswith("="):
        return Value(error=said[1:201] or "it gave nothing")
    try:
        return Value(json.loads(said[1:]))
    except (ValueError, RecursionError):
        return Value(error="its value cannot be read")


def _last(said: str) -> str:
    """The line that an exception leaves."""
    lines = said.strip().splitlines()
    return lines[-1][:200] if lines else ""
