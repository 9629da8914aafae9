"""Success on problems a policy was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from panoply.evaluation.pass_at_k import mean_pass_at_k, wilson
from panoply.experience import Segments
from panoply.policies.text import TextPolicy
from panoply.rollout.text import Collector
from panoply.worlds.world import Task, TextWorld


@dataclass(frozen=True)
class Evaluation:
    problems: int
    attempts: int
    greedy: float
    sampled: float
    pass_at: dict[int, float]
    samples: list[str]
    """A few greedy answers as text."""

    def to_json(self) -> dict[str, Any]:
        low, high = wilson(self.sampled, self.problems)
        return {
            "problems": self.problems,
            "attempts": self.attempts,
            "greedy": self.greedy,
            "greedy_interval": list(wilson(self.greedy, self.problems)),
            "sampled": self.sampled,
            "sampled_interval": [low, high],
            **{f"pass@{k}": v for k, v in self.pass_at.items()},
        }


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
) -> Evaluation:
    """Greedy success, and sampled success over `attempts` a problem with the unbiased pass@k."""
    tasks = world.held_out(problems)
    greedy, texts = _successes(world, policy, tasks, 1, 0.0, seed, shown)
    sampled, _ = _successes(world, policy, tasks, attempts, temperature, seed, 0)
    return Evaluation(
        problems,
        attempts,
        sum(greedy) / problems,
        sum(sampled) / (problems * attempts),
        {k: mean_pass_at_k(sampled, attempts, k) for k in ks},
        texts,
    )


def _successes(
    world: TextWorld,
    policy: TextPolicy,
    tasks: list[Task],
    attempts: int,
    temperature: float,
    seed: int,
    shown: int,
) -> tuple[list[int], list[str]]:
    """How many of a task's attempts succeeded, and some answers as text."""
    collector = Collector(world, policy, seed, split="test")
    experience = collector.episodes(tasks, attempts, temperature=temperature)
    groups = Segments(experience["group"])
    counts = groups.sum(experience["signal:success"]).round().long().tolist()
    tokens = experience.context.ragged("tokens")
    rows = experience.by("episode").first(experience["context"])[: shown * attempts : attempts].tolist()
    texts = [world.render(t, tokens[r].tolist()[len(t.prompt) :]) for t, r in zip(tasks, rows, strict=False)]
    return counts, texts
