"""Bandits, against expected values and gradients worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.control.bandit import Bandit, spelled
from panoply.worlds.control.mdp import softmax
from panoply.worlds.control.simulated import Draws, Simulation
from panoply.worlds.control.world import Box, Discrete


def batch(world: Bandit, n: int = 4) -> Simulation:
    envs = world.envs(n)
    envs.reset(np.arange(n), np.arange(n))
    return envs


def test_an_arm_pays_its_mean_and_the_episode_ends() -> None:
    world = Bandit(means=(0.0, 1.0, 0.25))
    assert world.action == Discrete(3)
    step = batch(world).step(np.array([0, 1, 2, 1]))
    assert step.reward.tolist() == [0.0, 1.0, 0.25, 1.0]
    assert step.terminated.all()
    assert not step.truncated.any()
    assert world.best() == 1


def test_the_gradient_of_a_softmax() -> None:
    """At equal logits of means 0, 1, ½: mean ½, so (0 − ½)/3, (1 − ½)/3, 0."""
    world = Bandit(means=(0.0, 1.0, 0.5))
    assert world.value(np.zeros(3)) == pytest.approx(0.5)
    np.testing.assert_allclose(world.gradient(np.zeros(3)), [-1 / 6, 1 / 6, 0])
    logits = np.array([0.3, -1.0, 0.7])
    for arm in range(3):
        moved = np.eye(3)[arm] * 1e-6
        slope = (world.value(logits + moved) - world.value(logits - moved)) / 2e-6
        assert world.gradient(logits)[arm] == pytest.approx(slope, abs=1e-9)


def test_problems_have_as_many_right_answers_as_asked_for() -> None:
    world = Bandit("problems", arms=20)
    assert (world.tables.means.sum(-1) == 2).all()
    assert world.tables.features.shape == (40, 20, 4)
    assert world.value(np.zeros((40, 20))) == pytest.approx(0.1)
    np.testing.assert_allclose(world.gradient(np.zeros((40, 20)))[world.tables.means == 1], 0.9 / 20 / 40)
    envs = batch(world, 300)
    assert len(set(envs.observations.tolist())) == 40
    assert envs.step(world.expert(envs.state)).reward.tolist() == [1.0] * 300


def test_a_linear_arm_pays_by_the_context() -> None:
    world = Bandit("linear", arms=3, features=2)
    envs = batch(world)
    assert envs.observations.shape == (4, 2)
    seen = envs.observations
    step = envs.step(np.array([0, 1, 2, 0]))
    expected = [float(c @ world.tables.means[:, a]) for c, a in zip(seen, (0, 1, 2, 0), strict=True)]
    np.testing.assert_allclose(step.reward, expected, rtol=1e-6)


def test_contexts_of_bits_as_numbers_and_as_features() -> None:
    """Two bits and two groups: cell 6 is the second group's context 2, whose second bit is set."""
    assert spelled(np.array([0, 1, 2]), 2).tolist() == [[1, -1, -1], [1, 1, -1], [1, -1, 1]]
    world = Bandit("bits", arms=3, bits=2, groups=2)
    state = {"problem": np.array([6]), "taken": np.zeros((1, 2))}
    assert (world.observation, world.look(state).tolist()) == (Discrete(8), [6])
    hidden = Bandit("bits", arms=3, bits=2, groups=2, told=False)
    assert (hidden.observation, hidden.look(state).tolist()) == (Discrete(4), [2])
    world, hidden = (Bandit("bits", arms=3, bits=2, groups=2, seen="features", told=t) for t in (True, False))
    assert world.observation == Box((6,))
    assert world.look(state).tolist() == [[0, 0, 0, 1, -1, 1]]
    assert hidden.look(state).tolist() == [[1, -1, 1]]
    envs = batch(world, 300)
    assert len(np.unique(envs.observations, axis=0)) == 8
    paid = envs.step(world.expert(envs.state)).reward
    np.testing.assert_allclose(paid, world.tables.means.max(-1)[envs.state["problem"]])


def test_what_is_linear_in_bits_is_fitted_by_them_and_a_table_is_not() -> None:
    seen = spelled(np.arange(32), 5)
    for structure, fits in (("linear", True), ("table", False)):
        worth = Bandit("bits", arms=2, bits=5, groups=2, structure=structure).tables.means[32:]
        error = worth - seen @ np.linalg.lstsq(seen, worth, rcond=None)[0]
        assert (np.abs(error).max() < 1e-9) == fits
    spread = Bandit("bits", arms=2, bits=12, structure="table").tables.means
    assert spread.mean() == pytest.approx(0.5, abs=0.01)
    assert spread.std() == pytest.approx(0.25, abs=0.01)
    linear = [Bandit("bits", bits=4, structure="linear", seed=i).tables.means for i in range(60)]
    assert np.std(linear) == pytest.approx(0.25, abs=0.02), "as spread as a table's"


class Always:
    """A policy that always takes the first arm."""

    def chances(self, seen: np.ndarray) -> np.ndarray:
        return np.tile([1.0, 0.0], (len(seen), 1))


def test_the_worst_served_group_by_hand() -> None:
    world = Bandit("bits", arms=2, bits=1, groups=2)
    first, second = world.tables.means.reshape(2, 2, 2)
    lost = [float((m.max(-1) - m[:, 0]).mean()) for m in (first, second)]
    assert world.measure("worst-group", Always()) == pytest.approx(max(lost))
    group, best = world.users(np.arange(50))
    cells = world.start(Draws(np.arange(50), 0))["problem"]
    assert group.tolist() == (cells // 2).tolist()
    np.testing.assert_allclose(best, world.tables.means.max(-1)[cells])
    with pytest.raises(PanoplyError, match="A bandit of arms has no groups of users; one of bits has"):
        Bandit().measure("worst-group", Always())


def test_a_ring_has_equal_peaks() -> None:
    world = Bandit("ring", modes=4, width=0.1)
    assert isinstance(world.action, Box)
    points = np.array([[1, 0], [0, 1], [0, 0], [-0.9, 0]], np.float32)
    paid = batch(world).step(points).reward
    np.testing.assert_allclose(paid, [1, 1, np.exp(-50), np.exp(-0.5)], rtol=1e-5)
    assert world.mode(points)[[0, 1, 3]].tolist() == [0, 1, 2]
    assert world.best() == 1


def test_noise_has_the_spread_asked_for() -> None:
    world = Bandit(means=(0.5, 0.5), noise=0.2)
    paid = batch(world, 20_000).step(np.zeros(20_000, np.int64)).reward
    assert paid.mean() == pytest.approx(0.5, abs=0.005)
    assert paid.std() == pytest.approx(0.2, abs=0.005)


def test_what_has_no_exact_value_says_so() -> None:
    with pytest.raises(PanoplyError, match="for arms, problems and bits, not for ring"):
        Bandit("ring").gradient(np.zeros(3))
    with pytest.raises(PanoplyError, match="no closed form"):
        Bandit("linear").best()
    with pytest.raises(PanoplyError, match="bandit.arms is at least 2"):
        Bandit(means=(1.0,))


def test_pictures_show_the_arm_taken() -> None:
    for world in (Bandit(), Bandit("ring"), Bandit("linear"), Bandit("bits")):
        envs = batch(world, 1)
        before = envs.render(0)
        action = np.ones((1, 2)) if world.variant == "ring" else np.ones(1, np.int64)
        envs.step(action)
        assert (envs.render(0) != before).any()
    assert softmax(np.zeros(2)).tolist() == [0.5, 0.5]
