"""Environments in processes of their own, as a run sees them: an episode that breaks costs itself alone."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from panoply.confined.limits import Limits
from panoply.confined.process import Asked, Confined, Failed, wait
from panoply.environments.environment import library_of, parse
from panoply.errors import PanoplyError, Resumable, plain

START = 120.0
"""Seconds a library has to be imported."""
BREAKDOWNS = 20
"""So many episodes that break one after another stop the run."""
ATTEMPTS = 3
"""How often an episode that does not begin is begun again."""


class Broken(Exception):
    """An environment that raised, hung, died or gave nonsense; the message says which."""


class Episode:
    """A seed, and what was said in it: all that a new process needs to stand where an old one stood."""

    def __init__(self, seed: int, said: Sequence[str] = ()):
        self.seed, self.said = seed, list(said)
        self.number, self.life = 0, -1
        """Its number in the process that holds it, and in which of that process's lives."""

    def copied(self) -> Episode:
        return Episode(self.seed, self.said)


class Crew:
    """Processes that hold episodes of one environment.

    A process that dies, or does not answer in time, is started again, and its other episodes are played again there
    as far as they had come; only the one that was asked about is lost.
    """

    def __init__(self, name: str, workers: int, seconds: float, memory: float):
        library, parsed = library_of(name), parse(name)
        assert parsed is not None
        self.name, self.seconds = name, seconds
        limits = Limits(memory=memory, network=library.network)
        target, arguments = "panoply.environments.worker:serve", (library.module, *parsed[1:])
        self._processes = [Confined(target, arguments, limits, START) for _ in range(workers)]
        self._lives = [0] * workers
        self._numbers = itertools.count(1)
        self._left: list[list[int]] = [[] for _ in range(workers)]
        self._begun = False
        self._breakdowns = 0
        self.failures: dict[str, int] = {}
        self.say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)
        self.shown = lru_cache(maxsize=8192)(self._shown)
        """What the episode of a seed shows first: text, or an agent's messages and tools."""

    def _shown(self, seed: int) -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            found = self.ask_all([Episode(seed)], [{"forget": True}])[0]
            if not isinstance(found, Broken):
                return found["shown"]
            if attempt == ATTEMPTS:
                raise PanoplyError(f"{self.name} does not begin an episode: {plain(found).rstrip('.')}.")
        raise AssertionError

    def step(self, episodes: Sequence[Episode], said: Sequence[str]) -> list[dict[str, Any] | Broken]:
        """What episodes show and earn after something was said in each."""
        found = self.ask_all(episodes, [{"say": words} for words in said])
        for episode, words, answer in zip(episodes, said, found, strict=True):
            if not isinstance(answer, Broken):
                episode.said.append(words)
                self._breakdowns = 0
        return found

    def expert(self, episode: Episode) -> str | None:
        """What should be said now."""
        found = self.ask_all([episode], [{"expert": True}])[0]
        return None if isinstance(found, Broken) else found["expert"]

    def leave(self, episode: Episode) -> None:
        """Nobody goes on with an episode: its process is told so when it is next asked something."""
        if episode.number:
            self._left[self._of(episode)].append(episode.number)

    def close(self) -> None:
        for process in self._processes:
            process.end()

    def lose(self, why: Broken) -> None:
        """Count an episode that broke, and say the first of a kind; too many in a row stop the run."""
        said = f"{self.name}: {plain(why)}"
        if said not in self.failures:
            self.say(
                f"An episode of {self.name} was cut, because {plain(why)}. Others that break are counted."
            )
        self.failures[said] = self.failures.get(said, 0) + 1
        self._breakdowns += 1
        if self._breakdowns >= BREAKDOWNS:
            raise Resumable(
                f"{self._breakdowns} episodes of {self.name} broke one after another, the last because {plain(why)}. "
                "No more are tried: mend the environment, or give it more time with world.seconds."
            )

    # -------------------------------------------------------------- asking

    def ask_all(
        self, episodes: Sequence[Episode], questions: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any] | Broken]:
        """Answers to a question about each of some episodes; those of different processes work side by side."""
        found: dict[int, dict[str, Any] | Broken] = {}
        queues = [
            [i for i, e in enumerate(episodes) if self._of(e) == worker]
            for worker in range(len(self._processes))
        ]
        under_way: dict[Asked, int] = {}
        while any(queues) or under_way:
            for worker, queue in enumerate(queues):
                if queue and all(self._of(episodes[i]) != worker for i in under_way.values()):
                    i = queue.pop(0)
                    under_way[self._begin(worker, episodes[i], questions[i])] = i
            for asked in wait(under_way.keys(), first=True):
                i = under_way.pop(asked)
                found[i] = _answer(asked)
        return [found[i] for i in range(len(episodes))]

    def _of(self, episode: Episode) -> int:
        """The process that holds an episode, which gets its number when it is first asked about."""
        episode.number = episode.number or next(self._numbers)
        return episode.number % len(self._processes)

    def _begin(self, worker: int, episode: Episode, question: dict[str, Any]) -> Asked:
        process = self._processes[worker]
        if not process.alive:
            self._start(process)
            self._lives[worker] += 1
        if episode.life != self._lives[worker]:
            question = {"begin": episode.seed, "said": episode.said, **question}
            episode.life = self._lives[worker]
        left, self._left[worker] = self._left[worker], []
        return process.begin({"episode": episode.number, "left": left, **question}, self.seconds)

    def _start(self, process: Confined) -> None:
        try:
            process.start()
        except Failed as error:
            kind, _, why = str(error).partition(": ")
            said = why if kind == "NoSuch" else f"{self.name} cannot be used: {error}."
            raise (Resumable if self._begun else PanoplyError)(plain(said)) from None
        self._begun = True


def _answer(asked: Asked) -> dict[str, Any] | Broken:
    try:
        answer = asked.result()
    except Failed as error:
        return Broken(str(error))
    return Broken(f"it raised {answer['error']}") if "error" in answer else answer


@lru_cache(maxsize=4)
def crew_of(name: str, workers: int, seconds: float, memory: float) -> Crew:
    """Shared by all worlds of one name, since a library takes seconds to import."""
    return Crew(name, workers, seconds, memory)
