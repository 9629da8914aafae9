"""Worlds with a log: episodes of scripted players of several qualities, and scores that are normalised by them."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from panoply.errors import PanoplyError
from panoply.seeds import numpy_rng
from panoply.worlds.episodic import Episodic
from panoply.worlds.measures import measures
from panoply.worlds.world import Task

if TYPE_CHECKING:
    from panoply.policies.text import TextPolicy

LOOKED_AT = 128
"""Held-out problems on which a policy's return is measured."""
SEARCHED = 4096
"""Tasks of the test split among which all different ones are found."""
LOGGED = 600
"""Episodes of the log whose mean return is the middle of the scale."""


class Scale(NamedTuple):
    """Returns of a world that stand for 0, 50 and 100 (arXiv 2311.18232): the least, the log's mean, and the best."""

    least: float
    mean: float
    best: float

    def score(self, earned: float) -> float:
        """A return on the scale, straight between its three points and beyond them."""
        if earned < self.mean:
            return 50 * (earned - self.least) / (self.mean - self.least)
        return 50 + 50 * (earned - self.mean) / (self.best - self.mean)


class Logged(Episodic):
    """A world whose scripted players (`written_by`) fill a log, and whose signal `score` is what an episode earns.

    A log is the same in every run: episode i is of the i-th training task and of player i.
    """

    @property
    @abstractmethod
    def least(self) -> float:
        """What an episode earns in which nothing succeeds and nothing is malformed."""

    def log(self, size: int) -> list[tuple[Task, list[int]]]:
        """The first episodes of the log: tasks, and what was said in all turns."""
        if "writers" not in self.access:
            raise PanoplyError(
                f"{self.name} has no scripted players with these settings, so there is no log of them."
            )
        kept = self.__dict__.setdefault("_log", [])
        for i in range(len(kept), size):
            task = self.task("train", i)
            kept.append((task, self.written_by(task, i, numpy_rng("log", self.name, i))))
        return list(kept[:size])

    def demonstrate(self, task: Task, rng: np.random.Generator) -> list[int]:
        """An episode of any of the players, where there are some."""
        if "writers" not in self.access:
            return super().demonstrate(task, rng)
        return self.written_by(task, int(rng.integers(2**31)), rng)

    def held_out(self, n: int) -> list[Task]:
        """Where there are players, all different problems of the test split; then they come round again."""
        if "writers" not in self.access:
            return super().held_out(n)
        return list(itertools.islice(itertools.cycle(self._held_out), n))

    @cached_property
    def _held_out(self) -> list[Task]:
        return list({task.id: task for task in (self.task("test", i) for i in range(SEARCHED))}.values())

    @cached_property
    def scale(self) -> Scale:
        logged = [self.grade(task, answer)["score"] for task, answer in self.log(LOGGED)]
        best = [self.grade(task, self.gold(task))["score"] for task in self.held_out(LOOKED_AT)]
        return Scale(self.least, float(np.mean(logged)), float(np.mean(best)))

    @measures("return")
    def earned(self, policy: TextPolicy, seed: int) -> float:
        """The mean return of sampled episodes on held-out problems."""
        from panoply.rollout.text import Collector

        if "score" not in self.signals():
            raise PanoplyError(
                f"{self.name} pays no score with these settings, so there is no return to measure."
            )
        rows = Collector(self, policy, seed, split="test").episodes(self.held_out(LOOKED_AT))
        return float(rows["signal:score"].sum()) / LOOKED_AT

    @measures("normalised")
    def normalised(self, policy: TextPolicy, seed: int) -> float:
        """That return, where 0 is the least, 50 the log's mean and 100 the best."""
        return self.scale.score(self.earned(policy, seed))
