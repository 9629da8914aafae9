"""Reinforcement learning in the era of language models: what is essential, what is needed."""

from __future__ import annotations

import math

from panoply.errors import PanoplyError
from panoply.evaluation import compounding
from panoply.evaluation.trilemma import slope
from panoply.evidence.claims import Ahead
from panoply.registry import algorithm, having, survey
from panoply.seeds import numpy_rng

LENGTHS = (4, 8, 16, 32)
SHOWN, PAIRS = 120, 2000
"""So few steps are shown that some symbols never are: after twice as many, imitation is right at once on many seeds."""
SETTINGS = {
    "imitation: demonstrations and no reward": ("data=demos reward=none",),
    "offline RL: logged actions and what they earned": (
        "feedback=offline reward=environment",
        "dataset feedback=offline reward=rule",
    ),
    "preferences of given answers, the reward implicit": ("feedback=offline reward=implicit",),
    "inverse RL, then RL: a reward learned from feedback, as in RLHF": ("reward=learned",),
    "own answers compared": ("reward=pairwise",),
    "RL with demonstrations beside it": ("feedback=online data=demos",),
    "online RL that goes back to states, or differentiates through what follows": ("dynamics=known",),
    "online RL on what the policy has just done": ("on_policy=yes", "on_policy=near"),
    "online RL on what was done before": ("feedback=online on_policy=no",),
    "other feedback that was given before": ("feedback=offline",),
}
"""What is given to a method, as the paper sets them apart, by tags; a work stands below the first that fits."""


@algorithm("compounding-error@1", paper=99)
def compounding_error(
    lengths: tuple[int, ...] = LENGTHS, shown: int = SHOWN, pairs: int = PAIRS, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Compounding error (arXiv 2310.06147), exactly: how imitation and RLHF fare as episodes get longer.

    At every step one of 16 actions is right; a wrong one leads off the track, where nobody has shown what to do, and a
    right one back (`panoply.evaluation.compounding`). Imitation has `shown` demonstrated steps, as many at every
    length. RLHF starts from it: annotators prefer the one of two own episodes with more right steps, `pairs` times; a
    reward for each action is fitted to that, and π ∝ π₀·exp(r/β). `success`: all steps are right; `wrong`: how many are
    not.

    What is surprising: RLHF mends errors on the track, where they begin, and little off it, since episodes that have
    gone astray are wrong nearly throughout and tell little. And the longer episodes are, the less a comparison says:
    with as many of them at every length, less and less is gained.
    """
    if not lengths or min(lengths) < 1 or max(lengths) > 1000 or shown < 1 or pairs < 1:
        raise PanoplyError(
            "compounding-error takes lengths from 1 to 1000, and at least one step shown and one pair."
        )
    task, rng = compounding.Task.drawn(seed), numpy_rng("compounding error", seed)
    imitator = compounding.imitated(task, shown, rng)
    table = {}
    for length in lengths:
        policies = {"sft": imitator, "rlhf": compounding.preferred(task, imitator, pairs, length, rng)}
        row: dict[str, float] = {}
        for name, policy in policies.items():
            on, off = compounding.errors(task, policy)
            row |= {
                f"{name} success": (1 - on) ** length,
                f"{name} wrong": compounding.wrong_steps(on, off, length),
            }
        table[f"{length} steps"] = row
    return table


def measure(seed: int) -> dict[str, float]:
    """How much less log success falls a step with RLHF than with imitation."""
    found = list(compounding_error(seed=seed).values())
    falls = {
        name: slope(LENGTHS, [math.log(row[f"{name} success"]) for row in found]) for name in ("sft", "rlhf")
    }
    longest = {name: value for name, value in found[-1].items() if name.endswith("success")}
    return {"log success a step, rlhf − sft": falls["rlhf"] - falls["sft"], **longest}


CLAIM = Ahead(
    "Episodes of 4, 8, 16 and 32 steps in which an error leads where nobody has shown what to do: success of imitation "
    "falls faster with length than that of RLHF from the same demonstrations and 2000 comparisons of own episodes.",
    measure,
)


@survey("rl-era-of-llms@1", paper=99, claim=CLAIM)
def rl_era_of_llms() -> dict[str, tuple[str, ...]]:
    """Reinforcement learning in the era of LLMs (arXiv 2310.06147): works by what they are given, demonstrations,
    preferences, rewards or rules, and whether they act while they learn.

    Its words are tags of every method and recipe: `data`, `dynamics`, `feedback` (online or offline), `on_policy`
    (`panoply list --tags`). Text has known dynamics, since an answer only gets longer; `dynamics=known` says of a
    method that it makes use of such, and goes back to states, branches or differentiates.

    Its reading of RLHF is inverse RL online, from data given offline, and why it does better than imitation is that
    errors compound: `panoply run compounding-error` counts that. There demonstrated steps are as many at every length;
    on `chain` longer problems show each operation more often, so that imitation may do better on them. Not measured is
    its remark that learning values off the policy varies more over seeds than PPO.
    """
    found: dict[str, tuple[str, ...]] = {}
    for heading, lines in SETTINGS.items():
        known = {name for names in found.values() for name in names}
        found[heading] = tuple(name for name in having(*lines) if name not in known)
    return found
