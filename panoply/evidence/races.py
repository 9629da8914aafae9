"""Standard races: a baseline with its world, budget and grid, under a name, so that many claims share its runs.

    claim=Learns("…", race="keydoor")

A claim in a race says only what is its own: the sentence, its method with changes, what the baseline must show. The
baseline is tuned once and run once a seed; the cache finds both again for the next claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from panoply.errors import unknown

RATES: Mapping[str, tuple[float, ...]] = {"update.lr": (1e-4, 3e-4, 1e-3)}
"""The grid that all sides begin with, where a race or a claim names no other."""


@dataclass(frozen=True)
class Race:
    """What is equal for all who run it. `more` are further fields of its claims, such as the metric."""

    baseline: str
    world: str
    budget: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tune: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: RATES)
    more: Mapping[str, Any] = field(default_factory=dict)


SIX_PROMPTS = (
    "strings has thirty-six prompts in all, six of them held out: what differs are the 256 answers to them"
)
UNTRAINED_COST = (
    "untrained orders cost many times what any sensible ones do, so that all sides come near the best"
)
AT_THE_WALL = "that a baseline without hints or teachers stays at 0 is the regime: see what it must show"
"""Why some claims waive a gate."""
RACES: dict[str, Race] = {
    "chain": Race("grpo", "chain", "decisions=80k"),
    "chain-answers": Race("grpo", "chain", "episodes=2560"),
    "frontier": Race("grpo", "chain:frontier", "episodes=7680"),
    "skew": Race("grpo", "chain:skew", "episodes=15360"),
    "wall": Race("grpo", "chain:wall", "decisions=150k", more={"waives": {"room": AT_THE_WALL}}),
    "coverage": Race("grpo", "manyanswers:coverage", "episodes=25600"),
    "keydoor": Race(
        "grpo", "keydoor", "episodes=2560", {"world.size": 6, "world.quest": (7, 12), "world.cap": 14}
    ),
    "recurring": Race(
        "grpo",
        "keydoor:hard",
        "episodes=3840",
        {"sample.pool": 32, "sample.prompts": 16, "sample.group": 4},
    ),
    "lookup": Race(
        "grpo", "tools", "episodes=2560", {"world.easy": 0.0, "sample.group": 4, "sample.prompts": 32}
    ),
    "questions": Race("ppo", "guess", "episodes=1280", {"sample.prompts": 64, "reward.name": "score"}),
    "rare": Race("grpo", "tools:hard", "episodes=7680"),
    "thrift": Race("grpo", "tools:thrift", "episodes=5120"),
    "hackable": Race(
        "reward model alone=reinforce:reward.name=proxy",
        "strings",
        "episodes=10240",
        {"world.bonus": 1.0},
        more={"metric": "success", "waives": {"problems": SIX_PROMPTS}},
    ),
    "stale": Race(
        "grpo",
        "chain:frontier",
        "episodes=7680",
        {"sample.by": "behind:20", "update.lr": 1e-3},
        tune={},
        more={
            "fixed": "stale answers at a high rate are the regime: a baseline free to choose its rate leaves it; at "
            "1e-3 GRPO learns slowly and REINFORCE falls to 0 on tuning seeds"
        },
    ),
    "countdown": Race("grpo", "manyanswers", "episodes=6400", {"world.kind": "countdown"}),
}


def find(name: str) -> Race:
    if name not in RACES:
        raise unknown("race", name, RACES)
    return RACES[name]
