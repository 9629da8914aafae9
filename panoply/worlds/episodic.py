"""Worlds of several turns: what is said in all of them, one after another, is the answer to a task."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from panoply.worlds.world import Lesson, Play, Task, TextWorld, earned

Mouth = Callable[[Play], list[int]]
"""What is said, or done, in an episode as it stands."""


class Episodic(TextWorld):
    """A world gives `play`, `complete`, an `expert` and a `careless` teacher; grades and lessons follow."""

    @abstractmethod
    def play(self, task: Task) -> Play: ...

    @abstractmethod
    def complete(self, answer: Sequence[int]) -> bool: ...

    @abstractmethod
    def expert(self, play: Play) -> list[int]: ...

    @abstractmethod
    def careless(self, play: Play, rng: np.random.Generator) -> list[int]:
        """What the careless teacher says in an episode as it stands."""

    def grade(self, task: Task, answer: Sequence[int]) -> dict[str, float]:
        """Signals summed over the turns. An answer that goes on after the end does not succeed."""
        play, total, done = self.play(task), {"success": 0.0}, False
        for said in self._split(answer):
            if done:
                return {**total, "success": 0.0}
            reply = play.act(said)
            total |= {name: total.get(name, 0.0) + earned(x) for name, x in reply.signals.items()}
            done = reply.done
        return total

    def signals(self) -> frozenset[str]:
        task = self.task("train", 0)
        return frozenset(self.grade(task, self.gold(task)))

    def gold(self, task: Task) -> list[int]:
        return [token for _, said in self._walk(task, self.expert) for token in said]

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        """A whole episode of the careless teacher, who does as it says."""
        return [t for _, said in self._walk(task, lambda play: self.careless(play, rng)) for t in said]

    def lessons(self, task: Task, rng: np.random.Generator) -> list[Lesson]:
        """The teacher plays carefully and says carelessly, or the late turns would never be seen."""
        return list(self._walk(task, lambda play: self.careless(play, rng), self.expert))

    def turns(self, task: Task, answer: Sequence[int]) -> list[Lesson]:
        said = self._split(answer)
        return list(self._walk(task, lambda _: next(said, [])))

    def _walk(self, task: Task, say: Mouth, do: Mouth | None = None) -> Iterator[Lesson]:
        """Prompts and what is said to them; what is done is what was said, or what `do` gives."""
        play = self.play(task)
        prompt = play.prompt
        while True:
            said = say(play)
            did = said if do is None else do(play)
            if not did:
                return
            yield prompt, said
            reply = play.act(did)
            if reply.done:
                return
            prompt = reply.observation if self.markov else (*prompt, *did, *reply.observation)

    def _split(self, answer: Sequence[int]) -> Iterator[list[int]]:
        """The turns of an answer; what is left over at its end is a turn too."""
        said: list[int] = []
        for token in answer:
            said.append(token)
            if self.complete(said):
                yield said
                said = []
        if said:
            yield said
