"""Effective horizons of MDPs worked out by hand, and SQIRL on tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from panoply.evaluation.effective_horizon import effective_horizon, fitted, ladder, tabular_sqirl
from panoply.seeds import numpy_rng
from panoply.worlds.control.mdp import MDP
from panoply.worlds.control.tabular import Tabular


def tempting(lure: float) -> MDP:
    """From state 0 to state 1 for nothing, or to the end for `lure`; from 1 to the end for 1 or for nothing."""
    transitions, rewards = np.zeros((3, 2, 3)), np.zeros((3, 2, 3))
    for state, action, to, pays in ((0, 0, 1, 0.0), (0, 1, 2, lure), (1, 0, 2, 1.0), (1, 1, 2, 0.0)):
        transitions[state, action, to], rewards[state, action, to] = 1.0, pays
    transitions[2, :, 2] = 1.0
    return MDP(transitions, rewards, np.array([1.0, 0, 0]), np.array([False, False, True]))


def test_a_lock_of_two_turns() -> None:
    """Q¹ sees 1/2 against 0 and Q² sees 1 against 0: H̄_1 = 1 + log2 4 = 3, H̄_2 = 2."""
    world = Tabular(variant="lock", size=2, actions=2, lure=0.0, horizon=2)
    found = effective_horizon(world.mdp, 2)
    assert found.by_k == {1: pytest.approx(3.0), 2: pytest.approx(2.0)}
    assert (found.k, found.value) == (1, pytest.approx(2.0))


def test_a_lure_that_random_play_prefers() -> None:
    """0.6 at once is more than a random half of 1: one greedy turn is not enough, two see 1 − 0.6 = 0.4."""
    found = effective_horizon(tempting(0.6), 2)
    assert found.k == 2
    assert found.by_k == {2: pytest.approx(2 + 2 * math.log2(1 / 0.4))}
    assert effective_horizon(tempting(0.6), 2, most=1).value == math.inf
    assert effective_horizon(tempting(0.4), 2).k == 1


def test_rungs_by_hand() -> None:
    first, second = ladder(tempting(0.6), 2, 2)
    assert first[0, 0].tolist() == [0.5, 0.6]
    assert second[0, 0].tolist() == [1.0, 0.6]
    assert first[1, 1].tolist() == second[1, 1].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("variant", ["corridor", "lock", "chain", "riverswim", "random"])
def test_as_many_rungs_as_turns_solve_everything(variant: str) -> None:
    world = Tabular(variant=variant, size=4, horizon=4)  # type: ignore[arg-type]
    found = effective_horizon(world.mdp, 4)
    assert 4 in found.by_k
    np.testing.assert_allclose(ladder(world.mdp, 4, 4)[-1], world.mdp.optimal(1.0, 4), atol=1e-12)


def test_regression_by_hand() -> None:
    """Two episodes: 0 →a0→ 1 →a0→ end for 1, and 0 →a0→ 1 →a1→ end for 0; and 0 →a1→ end for 0.6.

    Q¹(0, a0) is the mean return 1/2, and Q² looks at the best of state 1, which is 1.
    """
    steps = {
        "state": np.array([0, 1, 0, 1, 0]),
        "action": np.array([0, 0, 0, 1, 1]),
        "reward": np.array([0.0, 1.0, 0.0, 0.0, 0.6]),
        "after": np.array([1, 2, 1, 2, 2]),
        "going": np.array([True, False, True, False, False]),
        "return": np.array([1.0, 1.0, 0.0, 0.0, 0.6]),
    }
    assert fitted(steps, 3, 2, k=1).tolist() == [[0.5, 0.6], [1.0, 0.0], [0.0, 0.0]]
    assert fitted(steps, 3, 2, k=2).tolist() == [[1.0, 0.6], [1.0, 0.0], [0.0, 0.0]]
    assert fitted(steps, 3, 2, k=2, gamma=0.5)[0].tolist() == [0.5, 0.6]


def test_sqirl_needs_the_rungs_that_the_problem_needs() -> None:
    mdp = tempting(0.6)
    values = []
    for k in (1, 2):
        policy, taken = tabular_sqirl(mdp, 2, k, 200, numpy_rng("sqirl"))
        values.append(mdp.value(policy, 1.0, 2))
        assert 400 <= taken <= 800
    assert values == [pytest.approx(0.6), pytest.approx(1.0)]
