"""Success on problems a policy was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from panoply.errors import PanoplyError
from panoply.evaluation.pass_at_k import mean_pass_at_k, wilson
from panoply.experience import transcript
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.worlds.world import Task, TextWorld

ROWS = 512
"""Answers written at a time."""


@dataclass(frozen=True)
class Evaluation:
    """Rates measured on held-out problems. The last of them is the one that says which checkpoint is best."""

    problems: int
    rates: dict[str, float]
    attempts: int = 1
    pass_at: dict[int, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    """Sampled success on each kind of problem, where a world has several."""
    samples: list[str] = field(default_factory=list)
    """A few greedy answers as text."""

    @property
    def score(self) -> float:
        return list(self.rates.values())[-1]

    @property
    def greedy(self) -> float:
        return self.rates["greedy"]

    @property
    def sampled(self) -> float:
        return self.rates["sampled"]

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"problems": self.problems, "attempts": self.attempts}
        for name, rate in self.rates.items():
            found |= {name: rate, f"{name}_interval": list(wilson(rate, self.problems))}
        found |= {"parts": self.parts} if self.parts else {}
        return {**found, **{f"pass@{k}": v for k, v in self.pass_at.items()}}


def evaluate(
    world: TextWorld,
    policy: TextPolicy,
    problems: int,
    *,
    attempts: int = 1,
    ks: Sequence[int] = (1,),
    temperature: float = 1.0,
    seed: int = 0,
    shown: int = 4,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Greedy success, and sampled success over `attempts` a problem with the unbiased pass@k.

    watch   is told now and then how many of all answers have been written
    """
    tasks = world.held_out(problems)
    problems = len(tasks)
    total, done = problems * (1 + attempts), 0

    def tick(answers: int) -> None:
        nonlocal done
        done += answers
        watch(done, total)

    watch(0, total)
    greedy, texts = _successes(world, policy, tasks, 1, 0.0, seed, shown, tick)
    sampled, _ = _successes(world, policy, tasks, attempts, temperature, seed, 0, tick)
    rates = {"greedy": sum(greedy) / problems, "sampled": sum(sampled) / (problems * attempts)}
    passed = {k: mean_pass_at_k(sampled, attempts, k) for k in ks}
    return Evaluation(problems, rates, attempts, passed, _by_part(world, tasks, sampled, attempts), texts)


def _by_part(world: TextWorld, tasks: list[Task], successes: list[int], attempts: int) -> dict[str, float]:
    found: dict[str, list[int]] = {}
    for task, count in zip(tasks, successes, strict=True):
        found.setdefault(world.part_of(task), []).append(count)
    return {part: sum(counts) / (len(counts) * attempts) for part, counts in sorted(found.items()) if part}


def _successes(
    world: TextWorld,
    policy: TextPolicy,
    tasks: list[Task],
    attempts: int,
    temperature: float,
    seed: int,
    shown: int,
    tick: Callable[[int], None],
) -> tuple[list[int], list[str]]:
    """How many of a task's attempts succeeded, and some answers as text.

    Some hundred answers at a time: the draws belong to the episodes, so they do not depend on it.
    """
    collector = Collector(world, policy, seed, split="test")
    counts: list[int] = []
    texts: list[str] = []
    size = max(1, ROWS // attempts)
    for some in (tasks[i : i + size] for i in range(0, len(tasks), size)):
        first = collector.state["groups"]
        experience = collector.episodes(some, attempts, temperature=temperature)
        if "signal:success" not in experience:
            raise PanoplyError(
                f"The world {world.name} grades answers without 'success', so none can be measured."
            )
        found = torch.zeros(len(some)).index_add(0, experience["group"] - first, experience["signal:success"])
        counts += found.round().long().tolist()
        episodes = experience.by("episode").keys[::attempts].tolist()
        for task, episode in zip(some[: max(0, shown - len(texts))], episodes, strict=False):
            tokens, _ = transcript(experience, episode)
            texts.append(world.render(task, tokens[len(task.prompt) :]))
        tick(len(some) * attempts)
    return counts, texts
