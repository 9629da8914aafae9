"""A user's tools, as a world sees them: schemas, and calls that cost an error message at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from panoply.confined.limits import Limits
from panoply.confined.process import Confined, Failed, TookTooLong
from panoply.errors import PanoplyError, nearest, plain
from panoply.tools.calls import Call
from panoply.tools.schema import wrong_with

START = 60.0
"""Seconds that files of tools have to be loaded."""


class Box:
    """Tools by name, `FILE.py:NAME` each, in a process with limits of time, memory and network."""

    def __init__(self, sources: Sequence[str], seconds: float, limits: Limits):
        self.seconds = seconds
        split = [source.rpartition(":") for source in sources]
        names = [name for _, _, name in split]
        if len(set(names)) < len(names):
            raise PanoplyError("Two tools have the same name: rename one of them.")
        pairs = [(file, name) for file, _, name in split]
        self._process = Confined("panoply.tools.worker:serve", (pairs,), limits, START)

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """What a model is told of the tools."""
        try:
            found: list[dict[str, Any]] = self._process.ask({}, START)["schemas"]
        except Failed as error:
            said = str(error).removeprefix("NoTool: ")
            raise PanoplyError(f"The tools cannot be used: {plain(said).rstrip('.')}.") from None
        return found

    @cached_property
    def _parameters(self) -> dict[str, Mapping[str, Any]]:
        return {s["function"]["name"]: s["function"]["parameters"] for s in self.schemas}

    @property
    def names(self) -> list[str]:
        return list(self._parameters)

    def call(self, call: Call) -> tuple[str, bool]:
        """What a call shows, and whether it was one that worked."""
        wrong = self.wrong_with(call)
        if wrong:
            return f"Error: {wrong}.", False
        try:
            answer = self._process.ask({"call": call.name, "arguments": call.arguments}, self.seconds)
        except TookTooLong:
            return f"Error: {call.name} took longer than {self.seconds:g} s.", False
        except Failed as error:
            return f"Error: {call.name} failed, because {error}.", False
        if "error" in answer:
            return f"Error: {answer['error']}", False
        return str(answer["result"]), True

    def wrong_with(self, call: Call) -> str:
        """Why a call is not made, in words; nothing where it can be."""
        if call.wrong:
            return call.wrong
        if call.name not in self._parameters:
            near = nearest(call.name, self.names)
            there = f"did you mean '{near[0]}'?" if near else f"there is {', '.join(self.names)}"
            return f"there is no tool '{call.name}'; {there}"
        return wrong_with(call.arguments, self._parameters[call.name])

    def close(self) -> None:
        self._process.end()


@lru_cache(maxsize=4)
def box_of(sources: tuple[str, ...], seconds: float, limits: Limits) -> Box:
    """Shared by all worlds with the same tools, since their files may take long to load."""
    return Box(sources, seconds, limits)
