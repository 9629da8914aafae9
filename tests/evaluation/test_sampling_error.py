"""Sampling errors: by hand, and the fitted one against the exact one."""

from __future__ import annotations

import math

import pytest
import torch

from panoply.evaluation.sampling_error import fitted_error, tabular_error
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.rollout.control import ControlCollector
from panoply.worlds.control.bandit import Bandit

EVEN = torch.full((3, 2), 0.5)


def test_by_hand() -> None:
    """In state 0 twice the first action and once the second; in state 2 once each; state 1 is never seen."""
    state, action = torch.tensor([0, 0, 0, 2, 2]), torch.tensor([0, 0, 1, 1, 0])
    expected = 3 / 5 * (2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3))
    assert tabular_error(state, action, EVEN) == pytest.approx(expected)
    assert tabular_error(state[3:], action[3:], EVEN) == 0
    skewed = torch.tensor([[2 / 3, 1 / 3], [0.5, 0.5], [0.5, 0.5]])
    assert tabular_error(state, action, skewed) == pytest.approx(0, abs=1e-7)


def test_the_fitted_error_of_a_table_is_the_exact_one() -> None:
    world = Bandit("problems", problems=3, arms=4)
    policy = ControlPolicy.fresh(world.observation, world.action, PolicySpec(hidden=()))
    done = ControlCollector(world, policy, 0).rollout(1, 60)
    exact = tabular_error(done.looked_up("observation"), done["action"], torch.full((3, 4), 0.25))
    before = policy.fingerprint()
    assert fitted_error(policy, done, epochs=400, lr=0.05) == pytest.approx(exact, rel=1e-3)
    assert policy.fingerprint() == before
    assert exact > 0.01
