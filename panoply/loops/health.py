"""Is a run still sound? What a loss does not show."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from panoply.errors import PanoplyError
from panoply.kinds import Collector, Policy
from panoply.loops.learner import Scorer
from panoply.loops.mover import Diverged

GROWTH = 1000.0
"""How many times the norm of the weights a run started with is divergence and not learning."""


def check_growth(step: int, described: Mapping[str, float], norm: float, start: float) -> None:
    """Endless rewards, all alike, earn no credit, and huge weights make mere noise: neither shows in the loss."""
    if not math.isfinite(described.get("reward", 0.0)):
        raise Diverged(f"Stopped: in step {step} the mean reward is {described['reward']}.")
    most = GROWTH * start if start else math.inf  # a table of zeros has no size of its own
    if not (math.isfinite(norm) and norm <= most):
        raise Diverged(
            f"Stopped: in step {step} the norm of the weights went from {start:.3g}, where the run started, to "
            f"{norm:.3g}."
        )


def weight_norm(model: Scorer) -> float:
    with torch.no_grad():
        return float(torch.nn.utils.get_total_norm([p for _, p in model.named_parameters()]))


def speaks(policy: Policy, probe: Collector) -> bool:
    """Whether the policy still gives finite log-probabilities to what it does."""
    try:
        found = probe.episodes(probe.tasks(8))
        scored = policy.score(found)["logp"]
    except (PanoplyError, RuntimeError):
        return False
    return bool(torch.isfinite(scored).all() and torch.isfinite(found["logp"]).all())
