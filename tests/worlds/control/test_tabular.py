"""Exact values of small MDPs, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.control.mdp import MDP, greedy, softmax
from panoply.worlds.control.tabular import Tabular
from panoply.worlds.control.world import Array


def uniform(mdp: MDP) -> Array:
    return np.full((mdp.states, mdp.actions), 1 / mdp.actions)


# ------------------------------------------------------------------ values


def test_the_best_way_along_a_corridor() -> None:
    mdp = Tabular("corridor", size=4).mdp
    np.testing.assert_allclose(mdp.optimal(0.9).max(-1), [0.81, 0.9, 1.0, 0.0])
    assert mdp.best(0.9) == pytest.approx(0.81)
    assert mdp.best(1.0, horizon=2) == 0
    assert mdp.best(1.0, horizon=3) == 1


def test_a_walk_at_random_along_a_corridor() -> None:
    """γ = ½: V₀ = ¼V₀ + ¼V₁ and V₁ = ¼V₀ + ½, so V₀ = 2/11 and V₁ = 6/11."""
    mdp = Tabular("corridor", size=3).mdp
    q = mdp.evaluate(uniform(mdp), 0.5)
    np.testing.assert_allclose((uniform(mdp) * q).sum(-1), [2 / 11, 6 / 11, 0], atol=1e-15)
    assert mdp.value(uniform(mdp), 0.5) == pytest.approx(2 / 11)
    stages = mdp.evaluate(uniform(mdp), 1.0, horizon=2)
    np.testing.assert_allclose(stages[1], [[0, 0], [0, 1], [0, 0]])
    np.testing.assert_allclose(stages[0], [[0, 0.5], [0, 1], [0, 0]])


def test_where_a_walk_at_random_goes() -> None:
    """γ = ½: visits n₀ = 1 + ¼n₀ + ¼n₁ and n₁ = ¼n₀, so n₀ = 16/11 and n₁ = 4/11."""
    mdp = Tabular("corridor", size=3).mdp
    visits = mdp.occupancy(uniform(mdp), 0.5).sum(-1)
    np.testing.assert_allclose(visits, [16 / 11, 4 / 11, 0], atol=1e-15)
    by_time = mdp.occupancy(uniform(mdp), 1.0, horizon=3).sum(-1)
    np.testing.assert_allclose(by_time, [[1, 0, 0], [0.5, 0.5, 0], [0.5, 0.25, 0]])


@pytest.mark.parametrize("horizon", [None, 5])
def test_returns_are_rewards_where_a_policy_goes(horizon: int | None) -> None:
    mdp = Tabular("random", size=6, actions=3).mdp
    policy = softmax(np.random.default_rng(0).normal(size=(6, 3)))
    earned = (mdp.occupancy(policy, 0.9, horizon) * mdp.reward).sum()
    assert earned == pytest.approx(mdp.value(policy, 0.9, horizon), rel=1e-12)


@pytest.mark.parametrize("horizon", [None, 4])
def test_gradients_are_those_of_finite_differences(horizon: int | None) -> None:
    mdp = Tabular("random", size=4, actions=3, slip=0.2).mdp
    logits = np.random.default_rng(1).normal(size=(4, 3))
    exact = mdp.gradient(logits, 0.9, horizon)
    for at in np.ndindex(4, 3):
        moved = np.zeros((4, 3))
        moved[at] = 1e-5
        up, down = (mdp.value(softmax(logits + s * moved), 0.9, horizon) for s in (1, -1))
        assert exact[at] == pytest.approx((up - down) / 2e-5, rel=1e-6, abs=1e-9)


def test_the_best_policy_is_worth_the_best_value() -> None:
    for variant in ("chain", "riverswim", "random"):
        mdp = Tabular(variant).mdp
        assert mdp.value(greedy(mdp.optimal(0.95)), 0.95) == pytest.approx(mdp.best(0.95), rel=1e-9)
        stages = greedy(mdp.optimal(1.0, 12))
        assert mdp.value(stages, 1.0, 12) == pytest.approx(mdp.best(1.0, 12), rel=1e-9)


def test_values_that_do_not_exist_are_refused() -> None:
    mdp = Tabular("chain").mdp
    with pytest.raises(PanoplyError, match="has episodes without an end, and no value"):
        mdp.evaluate(uniform(mdp), 1.0)


# ------------------------------------------------------------------ the variants


def test_a_lock_pays_for_the_one_combination() -> None:
    mdp = Tabular("lock", size=3, actions=4, lure=0.1).mdp
    assert mdp.best() == 1
    assert mdp.value(uniform(mdp)) == pytest.approx(1 / 64 + 0.1 * 63 / 64)
    other = Tabular("lock", size=3, actions=4, seed=1).mdp
    assert (other.optimal().argmax(-1) != mdp.optimal().argmax(-1)).any()


def test_a_tree_pays_at_some_of_its_leaves() -> None:
    mdp = Tabular("tree", size=3, actions=2, goals=3).mdp
    assert mdp.states == 15
    assert mdp.terminal.sum() == 8
    assert mdp.value(uniform(mdp)) == pytest.approx(3 / 8)


def test_the_river_has_strehl_and_littmans_currents() -> None:
    mdp = Tabular("riverswim").mdp
    np.testing.assert_allclose(mdp.transitions[0, 1], [0.4, 0.6, 0, 0, 0, 0])
    np.testing.assert_allclose(mdp.transitions[3, 1], [0, 0, 0.05, 0.6, 0.35, 0])
    np.testing.assert_allclose(mdp.transitions[5, 1], [0, 0, 0, 0, 0.4, 0.6])
    np.testing.assert_allclose(mdp.transitions[3, 0], [0, 0, 1, 0, 0, 0])
    assert mdp.reward[0].tolist() == [0.005, 0]
    assert mdp.reward[5].tolist() == [0, 1]
    assert mdp.reward[1:5].any() == 0


def test_the_windy_grid_takes_fifteen_steps() -> None:
    """As in Sutton and Barto, example 6.5; without wind, the goal is seven steps to the right."""
    assert Tabular("windy").mdp.best() == -15
    assert Tabular("windy", wind=0).mdp.best() == -7


def test_a_chain_tempts_back() -> None:
    """Five states, γ = 0.9: forward to the end is worth 0.9⁴/(1 − 0.9) = 6.561, back for ever 0.2/0.1 = 2."""
    mdp = Tabular("chain").mdp
    assert mdp.best(0.9) == pytest.approx(6.561)
    back = np.eye(2)[[1] * 5]
    assert mdp.value(back, 0.9) == pytest.approx(2.0)


def test_a_slip_takes_another_action() -> None:
    mdp = Tabular("corridor", size=3, slip=0.25).mdp
    np.testing.assert_allclose(mdp.transitions[1, 1], [0.25, 0, 0.75])
    assert mdp.reward[1].tolist() == [0.25, 0.75]


def test_coverage_of_data_and_of_all_policies() -> None:
    """In a tree every node of a level can be reached for sure, in a lock only the right one."""
    tree, lock = Tabular("tree", size=2, actions=2, goals=1).mdp, Tabular("lock", size=3, actions=4).mdp
    assert tree.coverability(2) == 4
    assert lock.coverability(3) == 4
    mdp = Tabular("corridor", size=3).mdp
    right = np.eye(2)[[1, 1, 1]]
    assert mdp.concentrability(right, np.full((3, 2), 1 / 6), 2) == 3
    assert mdp.concentrability(right, np.eye(2)[[0, 0, 0]] / 3, 2) == np.inf


# ------------------------------------------------------------------ as a world


def test_the_world_moves_as_its_model_says() -> None:
    world = Tabular("riverswim", slip=0.1)
    envs = world.envs(20_000)
    envs.reset(np.arange(20_000), np.arange(20_000))
    envs.reset_to(np.arange(20_000), {"at": np.full(20_000, 3)})
    step = envs.step(np.ones(20_000, np.int64))
    shares = np.bincount(envs.observations, minlength=6) / 20_000
    np.testing.assert_allclose(shares, world.mdp.transitions[3, 1], atol=0.01)
    assert not step.terminated.any()


def test_the_expert_walks_the_best_way() -> None:
    world = Tabular("windy")
    envs = world.envs(1)
    envs.reset(np.arange(1), np.arange(1))
    total, done = 0.0, False
    while not done:
        step = envs.step(world.expert(envs.state))
        total, done = total + step.reward[0], bool(step.terminated[0] or step.truncated[0])
    assert total == -15
    assert step.terminated[0]
    assert envs.render(0).shape == (168, 240, 3)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"slip": 1.5}, "tabular.slip must be from 0 to 1, not 1.5."),
        ({"variant": "tree", "size": 2, "actions": 2, "goals": 5}, "a number of the tree's leaves"),
        ({"variant": "random", "branching": 11}, "tabular.branching is a number of states."),
        ({"size": 1}, "tabular.size must be from 2 to 10000, not 1."),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        Tabular(**settings)
    with pytest.raises(PanoplyError, match="too large for exact tables"):
        _ = Tabular("tree", size=6).mdp
