"""A user's reward function in a process of its own, with limits: a hang or crash costs one sample, many end the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from panoply.confined.limits import Limits
from panoply.confined.process import Asked, Confined, Failed, TookTooLong, wait
from panoply.errors import PanoplyError, Resumable

Fields = Mapping[str, Sequence[Any]]
WORKERS = max(2, min(4, os.cpu_count() or 1))
"""Processes that try answers one by one, where a whole batch took too long."""
BREAKDOWNS = 5
"""So many answers on which a function hangs or dies, without a batch in between that passes, stop the run."""


class _Raised(Failed):
    """The function raised, or gave nonsense; its process is well."""


class RewardFunction:
    """`FILE.py:NAME`, called with batches. Samples on which it fails get None, and `failures` counts why.

    A batch that fails is tried again sample by sample, so that only the guilty ones are lost: by the same process
    where the function raised, by several at a time where it hung or died. The first time is said at once; a function
    that breaks down again and again stops the run.
    """

    def __init__(self, source: str, seconds: float = 10.0, limits: Limits | None = None):
        file, separator, name = source.rpartition(":")
        if not separator or not Path(file).is_file():
            raise PanoplyError(
                f"A reward function is FILE.py:NAME, and '{source}' names no file that exists."
            )
        self.source, self.name, self.seconds = source, name, seconds
        self.limits = limits or Limits()
        self.say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
        """Where what a user must know at once goes."""
        self.failures: dict[str, int] = {}
        self._file = file
        self._first = self._worker()
        self._told: set[str] = set()
        self._breakdowns = 0
        try:
            self._first.start()
        except Failed as error:
            raise PanoplyError(f"The reward function {source} cannot be used: {_plain(error)}.") from None

    def __call__(self, fields: Fields) -> list[float | None]:
        """One reward a completion, or None."""
        return call_all([self], fields)[0]

    def close(self) -> None:
        self._first.end()

    # -------------------------------------------------------------- a batch

    def begin(self, fields: Fields) -> Asked:
        """Ask for a whole batch, without waiting."""
        for what in self._first.not_limited:
            self._say_once(what, f"The reward function {self.source} runs without a limit: {what}.")
        return self._ask(self._first, fields)

    def finish(self, asked: Asked, fields: Fields) -> list[float | None]:
        """The batch's rewards, those of a batch that failed one by one."""
        number, before = len(fields["completions"]), self._breakdowns
        try:
            found: list[float | None] = [*self._values(asked, number)]
        except Failed as error:
            if not isinstance(error, _Raised):
                self._tell(error, number)
            if number > 1:
                found = self._one_by_one(fields)
            else:
                self._lose(error)
                found = [None]
        if self._breakdowns == before:
            self._breakdowns = 0
        return found

    def _one_by_one(self, fields: Fields) -> list[float | None]:
        number = len(fields["completions"])
        found: list[float | None] = [None] * number
        waiting = list(range(number))[::-1]
        crew = [self._first]
        if not self._first.alive:
            crew += [self._worker() for _ in range(min(WORKERS, number) - 1)]
        under_way: dict[Asked, int] = {}
        idle = list(crew)
        try:
            while waiting or under_way:
                while waiting and idle:
                    index = waiting.pop()
                    one = {name: [column[index]] for name, column in fields.items()}
                    under_way[self._ask(idle.pop(), one)] = index
                for asked in wait(under_way.keys(), first=True):
                    index = under_way.pop(asked)
                    idle.append(asked.confined)
                    try:
                        found[index] = self._values(asked, 1)[0]
                    except Failed as error:
                        self._lose(error)
        finally:
            for extra in crew[1:]:
                extra.end()
        return found

    def _lose(self, error: Failed) -> None:
        """Note why an answer has no reward; too many hangs stop the run."""
        self.failures[str(error)] = self.failures.get(str(error), 0) + 1
        self._breakdowns += not isinstance(error, _Raised)
        if self._breakdowns >= BREAKDOWNS:
            raise Resumable(
                f"The reward function {self.source} failed on {self._breakdowns} answers, the last time because "
                f"{error}. No more are tried: mend it, or give it more time with world.seconds."
            )

    # -------------------------------------------------------------- one call

    def _worker(self) -> Confined:
        return Confined("panoply.rewards.worker:serve", (self._file, self.name), self.limits)

    def _ask(self, worker: Confined, fields: Fields) -> Asked:
        try:
            return worker.begin({name: list(column) for name, column in fields.items()}, self.seconds)
        except Failed as error:
            raise Resumable(
                f"The reward function {self.source} cannot be started again: {_plain(error)}."
            ) from None

    def _values(self, asked: Asked, number: int) -> list[float]:
        answer = asked.result()
        if answer.get("fatal"):
            raise PanoplyError(f"The reward function {self.source} cannot be used: {answer['error']}.")
        values = answer.get("values")
        if not isinstance(values, list) or len(values) != number:
            raise _Raised(self._explained(str(answer.get("error", "its answer cannot be read"))))
        return [float(v) for v in values]

    def _explained(self, why: str) -> str:
        """A reason, and the setting that may be behind it."""
        if why.startswith("MemoryError") and self.limits.memory:
            return f"{why} (it may take {self.limits.memory:g} GiB: world.memory raises that)"
        offline = ("ConnectionError", "gaierror", "ConnectError", "APIConnectionError", "URLError", "Network")
        unreachable = any(word in why for word in (*offline, "unreachable", "name resolution"))
        if unreachable and not self.limits.network:
            return f"{why} (reward functions have no network: world.network=true opens it)"
        return why

    def _tell(self, error: Failed, number: int) -> None:
        """Say the first hang, or the first death, when it happens."""
        answers = f"{number} answers; they are tried one by one" if number > 1 else "an answer"
        more = " world.seconds gives it more time." if isinstance(error, TookTooLong) else ""
        self._say_once(
            str(error),
            f"The reward function {self.source} failed, because {error}, on {answers}. The guilty ones are left out, "
            f"and after {BREAKDOWNS} of them the run stops.{more}",
        )

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self.say(text)


def call_all(functions: Sequence[RewardFunction], fields: Fields) -> list[list[float | None]]:
    """The rewards of all functions, which work at the same time, each in its own process."""
    asked = [function.begin(fields) for function in functions]
    wait(asked)
    return [function.finish(one, fields) for function, one in zip(functions, asked, strict=True)]


def _plain(error: Failed) -> str:
    """Why a function did not start."""
    return {"its process died": "it did not load"}.get(str(error), str(error))
