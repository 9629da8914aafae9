"""EAD: the temperature over positions, and the three readings of the ratio."""

from __future__ import annotations

import math

import pytest
import torch

from panoply.methods.reasoning_data.ead import annealed, annealed_temperature
from panoply.rollout.text import Collector


def test_golden_temperatures() -> None:
    position = torch.tensor([0.0, 1.0, 2.0, 10.0])
    found = annealed_temperature(position, hottest=1.2, coldest=0.1, warmup=1, scale=10.0)
    assert found.tolist() == pytest.approx([1.0, 2.2 - math.exp(0.1), 2.2 - math.exp(0.2), 0.1])


SETTINGS = {"prompts": 3, "group": 2, "warmup": 0, "scale": 4.0, "growth": 0.0}


def test_annealed_episodes_record_their_temperatures_and_keep_the_ratio_at_one(
    tiny_collector: Collector,
) -> None:
    found = annealed(**SETTINGS)(tiny_collector)
    first = found["position"] == found.by("episode").rows(found.by("episode").min(found["position"]))
    assert found["temperature"][first].tolist() == pytest.approx([1.2] * 6)
    assert float(found["temperature"].min()) < 1
    scored = tiny_collector.policy.score(found)["logp"]
    torch.testing.assert_close(scored, found["logp"], atol=1e-5, rtol=0)


def test_without_a_correction_the_temperatures_are_forgotten(tiny_collector: Collector) -> None:
    found = annealed(**SETTINGS, correction="none")(tiny_collector)
    assert "temperature" not in found
    assert "weight" not in found
    torch.testing.assert_close(tiny_collector.policy.score(found)["logp"], found["logp"], atol=1e-5, rtol=0)


def test_truncated_importance_is_the_bounded_quotient(tiny_collector: Collector) -> None:
    state = dict(tiny_collector.state)
    sampled = annealed(**SETTINGS)(tiny_collector)
    tiny_collector.state = state
    found = annealed(**SETTINGS, correction="truncated", cap=1.05)(tiny_collector)
    assert found["action"].tolist() == sampled["action"].tolist()
    quotient = (found["logp"] - sampled["logp"]).exp().clamp(max=1.05)
    torch.testing.assert_close(found["weight"], quotient)
    assert float(found["weight"].max()) == pytest.approx(1.05)
