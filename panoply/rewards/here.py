"""A reward function that lives in this process alone: a lambda, a closure, one that uses what the session has made.

It gets what a worker would give it, and failures count the same; the time limit works where the function runs Python
in the main thread. There are no other limits.
"""

from __future__ import annotations

import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from panoply.confined.process import Asked, Failed, TookTooLong
from panoply.errors import PanoplyError
from panoply.rewards.functions import Fields, RewardFunction
from panoply.rewards.worker import WrongLength, call

PREFIX = "python-"
_FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""By the word that stands for them in a plan, `python-1f2e3d4c:NAME`."""


def word_of(function: Callable[..., Any], name: str) -> str:
    """The word for a function; the same for the same function."""
    known = [word for word, held in _FUNCTIONS.items() if held is function]
    word = known[0] if known else f"{PREFIX}{secrets.token_hex(4)}:{name}"
    _FUNCTIONS[word] = function
    return word


def is_here(word: str) -> bool:
    """Whether a word stands for a function of some process, this one or another."""
    return word.startswith(PREFIX)


def find(word: str) -> Callable[..., Any]:
    if word not in _FUNCTIONS:
        name = word.partition(":")[2]
        raise PanoplyError(
            f"The reward function '{name}' lived in the process that made the run: hand it over again, reward={name}."
        )
    return _FUNCTIONS[word]


def hand_over(words: tuple[str, ...], functions: dict[str, Callable[..., Any]]) -> None:
    """Functions, by name, for the words of a run that was made by another process."""
    for word in words:
        name = word.partition(":")[2]
        if is_here(word) and name in functions:
            _FUNCTIONS[word] = functions[name]


class HereFunction(RewardFunction):
    """Called with batches like the others; samples on which it fails get None."""

    def __init__(self, source: str, seconds: float = 10.0):
        self.source, self.seconds = source.partition(":")[2], seconds
        self.name, self.function = self.source, find(source)
        self.say = lambda text: print(text, file=sys.stderr, flush=True)
        self.failures = {}
        self._told, self._breakdowns = set(), 0

    def close(self) -> None:
        """There is no process to end."""

    def begin(self, fields: Fields) -> Asked:
        return _Call(self.function, fields, self.seconds)

    def _one_by_one(self, fields: Fields) -> list[float | None]:
        found: list[float | None] = []
        for index in range(len(fields["completions"])):
            one = {name: [column[index]] for name, column in fields.items()}
            try:
                found += self._values(self.begin(one), 1)
            except Failed as error:
                self._lose(error)
                found.append(None)
        return found

    def _explained(self, why: str) -> str:
        return why


class _Call(Asked):
    """A call that is made when its result is asked for."""

    def __init__(self, function: Callable[..., Any], fields: Fields, seconds: float):
        self.function, self.fields, self.seconds = function, fields, seconds

    @property
    def done(self) -> bool:
        return True

    def result(self) -> dict[str, Any]:
        fields = {name: list(column) for name, column in self.fields.items()}
        try:
            with _time_limit(self.seconds):
                return {"values": call(self.function, fields)}
        except WrongLength as error:
            return {"error": str(error), "fatal": True}
        except TookTooLong:
            raise
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupt what takes longer, where signals can."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGALRM) not in (
        signal.SIG_DFL,
        signal.SIG_IGN,
    ):
        yield
        return

    def interrupt(*_: Any) -> None:
        raise TookTooLong(f"it took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
