"""What is measured of a policy in every world of text."""

from __future__ import annotations

import pytest
import torch

from panoply.policies.build import open_policy
from panoply.rollout.text import Collector
from panoply.worlds.text.strings import Strings


def test_how_far_a_policy_is_from_the_warm_start() -> None:
    """Σ log π/π_start of an answer, by the policy's own answers; and what they are worth, less a part of that."""
    world = Strings()
    policy = open_policy("start", world, 0, "cpu")
    assert world.measure("kl", policy) == 0.0
    with torch.no_grad():
        for _, weights in policy.named_parameters():
            weights.mul_(1.05)
    apart = world.measure("kl", policy)
    answers = Collector(world, policy, 0, split="test").episodes(world.held_out(64), 4)
    start = open_policy("start", world, 0, "cpu").score(answers)["logp"]
    with torch.no_grad():
        gaps = answers.by("episode").sum(answers["logp"] - start)
    assert apart == pytest.approx(float(gaps.mean()), abs=1e-4)
    assert apart > 0.01
    success = world.measure("success", policy)
    assert world.measure("regularised@5", policy) == pytest.approx(success - apart / 5)
