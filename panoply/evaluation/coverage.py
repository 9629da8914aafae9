"""How many different right answers a policy has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from panoply.evaluation.pass_at_k import mean_pass_at_k
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.worlds.world import Task, TextWorld

ROWS = 512
"""Answers written at a time."""


@dataclass(frozen=True)
class Coverage:
    """Means over held-out problems, all different, of `attempts` answers each."""

    problems: int
    attempts: int
    distinct: float
    """Different right answers among the attempts."""
    share: float
    """Different ones among the right answers; 0 where none is right."""
    pass_at: dict[int, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "problems": self.problems,
            "attempts": self.attempts,
            "distinct": self.distinct,
            "share": self.share,
            **{f"pass@{k}": value for k, value in self.pass_at.items()},
        }


def right_answers(
    world: TextWorld,
    policy: TextPolicy,
    tasks: Sequence[Task],
    attempts: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[list[tuple[int, ...]]]:
    """The right ones among a policy's answers to each task, in a world of one turn."""
    collector = Collector(world, policy, seed, split="test")
    found: list[list[tuple[int, ...]]] = []
    size = max(1, ROWS // attempts)
    for some in (tasks[i : i + size] for i in range(0, len(tasks), size)):
        experience = collector.episodes(some, attempts, temperature=temperature)
        episodes = experience.by("episode")
        right = episodes.sum(experience["signal:success"]).tolist()
        rows = episodes.first(experience["context"]).tolist()
        tokens = experience.context.ragged("tokens")
        for i, task in enumerate(some):
            mine = range(i * attempts, (i + 1) * attempts)
            answers = (tuple(tokens[rows[e]].tolist()[len(task.prompt) :]) for e in mine if right[e])
            found.append(list(answers))
    return found


def coverage(
    world: TextWorld,
    policy: TextPolicy,
    problems: int = 64,
    *,
    attempts: int = 32,
    ks: Sequence[int] = (1, 32),
    temperature: float = 1.0,
    seed: int = 0,
) -> Coverage:
    """Different right answers among `attempts` a problem, and the unbiased pass@k.

    A world that has fewer problems to hold out is asked each of them once.
    """
    tasks = list({task.id: task for task in world.held_out(problems)}.values())
    right = right_answers(world, policy, tasks, attempts, temperature=temperature, seed=seed)
    distinct = [len(set(answers)) for answers in right]
    counts = [len(answers) for answers in right]
    return Coverage(
        len(tasks),
        attempts,
        sum(distinct) / len(tasks),
        sum(d / max(1, c) for d, c in zip(distinct, counts, strict=True)) / len(tasks),
        {k: mean_pass_at_k(counts, attempts, k) for k in ks},
    )
