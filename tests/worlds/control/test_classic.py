"""The batched classic worlds, step by step against Gymnasium's, and what wraps them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.control.acrobot import Acrobot
from panoply.worlds.control.cartpole import Cartpole
from panoply.worlds.control.mountaincar import Mountaincar
from panoply.worlds.control.pendulum import Pendulum
from panoply.worlds.control.physical import Physical
from panoply.worlds.control.simulated import Simulation, State
from panoply.worlds.control.world import Array, Box, Discrete, MultiDiscrete


def body(state: State) -> Array:
    """The first row's state as Gymnasium keeps it."""
    names = ("body", "joints", "angle", "spin", "x", "velocity")
    return np.concatenate([state[name][0].reshape(-1) for name in names if name in state])


def of(world: Physical, values: Array) -> State:
    if isinstance(world, Cartpole):
        return {"body": values[None]}
    if isinstance(world, Acrobot):
        return {"joints": values[None]}
    if isinstance(world, Pendulum):
        return {"angle": values[:1], "spin": values[1:], "torque": np.zeros(1)}
    return {"x": values[:1], "velocity": values[1:]}


CLASSIC = [
    (Cartpole(), "CartPole-v1", 1e-12),
    (Pendulum(), "Pendulum-v1", 1e-12),
    (Acrobot(), "Acrobot-v1", 1e-12),
    (Mountaincar(), "MountainCar-v0", 1e-12),
    (Mountaincar(continuous=True), "MountainCarContinuous-v0", 1e-6),  # Gymnasium keeps float32 there
]


@pytest.mark.parametrize(("world", "name", "close"), CLASSIC, ids=[name for _, name, _ in CLASSIC])
def test_every_step_is_gymnasiums(world: Physical, name: str, close: float) -> None:
    env: Any = gymnasium.make(name, disable_env_checker=True)
    env.action_space.seed(0)
    ours = world.envs(1)
    rng = np.random.default_rng(0)
    ends = {"terminated": 0, "truncated": 0}
    for episode in range(4):
        env.reset(seed=episode)
        ours.reset(np.arange(1), np.array([episode]))
        ours.reset_to(np.arange(1), of(world, np.array(env.unwrapped.state, np.float64)))
        done = False
        while not done:
            continuous = isinstance(world.action, Box)
            scripted = world.expert(ours.state)[0]
            action = scripted if episode % 2 else env.action_space.sample()
            if not episode % 2 and continuous:
                action = rng.uniform(-3, 3, 1).astype(np.float32)
            seen, reward, terminated, truncated, _ = env.step(action)
            step = ours.step(np.asarray(action)[None])
            np.testing.assert_allclose(
                body(ours.state), np.asarray(env.unwrapped.state), rtol=close, atol=close
            )
            np.testing.assert_allclose(ours.observations[0], seen, rtol=1e-6, atol=1e-6)
            assert step.reward[0] == pytest.approx(reward, rel=1e-6)
            assert (step.terminated[0], step.truncated[0]) == (terminated, truncated)
            done = terminated or truncated
            ends["terminated"] += terminated
            ends["truncated"] += truncated
            ours.reset_to(np.arange(1), of(world, np.array(env.unwrapped.state, np.float64)), ours.clock)
    assert sum(ends.values()) == 4


@pytest.mark.parametrize(("world", "name", "_"), CLASSIC, ids=[name for _, name, _ in CLASSIC])
def test_spaces_limits_and_starts_are_gymnasiums(world: Physical, name: str, _: float) -> None:
    env: Any = gymnasium.make(name)
    assert world.horizon == env.spec.max_episode_steps
    assert world.observation.shape == env.observation_space.shape
    if isinstance(world.action, Discrete):
        assert world.action.n == env.action_space.n
    else:
        assert isinstance(world.action, Box)
        assert (world.action.low, world.action.high) == (
            tuple(env.action_space.low.tolist()),
            tuple(env.action_space.high.tolist()),
        )
    ours = world.envs(400)
    ours.reset(np.arange(400), np.arange(400))
    theirs = np.stack([env.reset(seed=s)[0] for s in range(400)])
    np.testing.assert_allclose(ours.observations.min(0), theirs.min(0), atol=0.1)
    np.testing.assert_allclose(ours.observations.max(0), theirs.max(0), atol=0.1)


def returns(world: Physical, n: int = 50) -> Array:
    envs = world.envs(n)
    envs.reset(np.arange(n), np.arange(n))
    total, live = np.zeros(n), np.ones(n, bool)
    while live.any():
        step = envs.step(envs.dynamics.expert(envs.state))
        total += live * step.reward
        live &= ~(step.terminated | step.truncated)
    return total


@pytest.mark.parametrize(
    ("world", "good"),
    [
        (Cartpole(), 499.9),
        (Pendulum(), -180),
        (Acrobot(), -95),
        (Mountaincar(), -118),
        (Mountaincar(continuous=True), 95),
    ],
)
def test_experts_are_good(world: Physical, good: float) -> None:
    assert returns(world).mean() > good


# ------------------------------------------------------------------ the batch


def batch(world: Physical, n: int = 3) -> Simulation:
    envs = world.envs(n)
    envs.reset(np.arange(n), np.arange(10, 10 + n))
    return envs


def test_a_row_depends_on_its_seed_and_actions_alone() -> None:
    world = Pendulum(adversary=1.0, vary=0.2)
    three, one = batch(world), world.envs(1)
    one.reset(np.arange(1), np.array([11]))
    for torque in (0.5, -1.0, 2.0):
        three.step(np.full((3, 1), torque))
        one.step(np.full((1, 1), torque))
    np.testing.assert_array_equal(three.observations[1], one.observations[0])


def test_rows_are_reset_alone_and_the_others_stay() -> None:
    envs = batch(Cartpole())
    envs.step(np.array([0, 1, 0]))
    before = envs.observations.copy()
    envs.reset(np.array([1]), np.array([99]))
    np.testing.assert_array_equal(envs.observations[[0, 2]], before[[0, 2]])
    assert envs.clock.tolist() == [1, 0, 1]
    assert np.abs(envs.observations[1]).max() < 0.05


def test_snapshots_and_forks_go_on_alike() -> None:
    envs = batch(Pendulum(adversary=1.0))
    torques = np.ones((3, 1))
    envs.step(torques)
    kept, fork = envs.snapshot(), envs.fork(np.array([2, 2]))
    first = envs.step(torques).reward
    np.testing.assert_array_equal(fork.step(np.ones((2, 1))).reward, first[[2, 2]])
    envs.step(torques)
    envs.restore(kept)
    np.testing.assert_array_equal(envs.step(torques).reward, first)


@pytest.mark.parametrize(
    ("actions", "sentence"),
    [
        (np.array([0, 1, 2]), "An action is a whole number from 0 to 1."),
        (np.array([0, 1]), r"Actions of shape \(3,\) are needed, not \(2,\)."),
    ],
)
def test_impossible_actions_are_refused(actions: Array, sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        batch(Cartpole()).step(actions)
    with pytest.raises(PanoplyError, match="An action is not a finite number."):
        batch(Pendulum()).step(np.array([[0.0], [np.nan], [0.0]]))


# ------------------------------------------------------------------ wrappers


def test_constants_vary_by_episode_and_can_be_seen() -> None:
    world = Pendulum(vary=0.3, reveal=True)
    envs = batch(world, 500)
    assert world.observation.shape == (6,)
    shares = envs.observations[:, 3:]
    assert shares.min() > 0.7
    assert shares.max() < 1.3
    assert np.ptp(shares, 0).min() > 0.55
    np.testing.assert_allclose(envs.state["gravity"], 10 * shares[:, 0], rtol=1e-6)
    before = envs.state["mass"]
    envs.step(np.zeros((500, 1)))
    np.testing.assert_array_equal(envs.state["mass"], before)


def test_drawn_constants_are_the_ones_that_move() -> None:
    """At rest on its side, spin after one step is 3g/2l · 0.05."""
    envs = batch(Pendulum(vary=0.3))
    side = {"angle": np.full(3, np.pi / 2), "spin": np.zeros(3)}
    envs.reset_to(np.arange(3), envs.state | side)
    envs.step(np.zeros((3, 1)))
    expected = 1.5 * envs.state["gravity"] / envs.state["length"] * 0.05
    np.testing.assert_allclose(envs.state["spin"], expected)


def test_an_adversary_pushes_by_chance_or_by_its_own_action() -> None:
    """Upright and still, spin after one step is 3/ml² · (torque + push) · 0.05."""
    still = {"angle": np.zeros(3), "spin": np.zeros(3)}
    chance = batch(Pendulum(adversary=0.5))
    chance.reset_to(np.arange(3), chance.state | still)
    chance.step(np.ones((3, 1)))
    pushes = chance.state["spin"] / 0.15 - 1
    assert np.abs(pushes).max() <= 0.5
    assert len(set(pushes.round(6))) == 3
    world = Pendulum(adversary=0.5, opponent="learner")
    assert world.action == Box((2,), (-2.0, -1.0), (2.0, 1.0))
    player = batch(world)
    player.reset_to(np.arange(3), player.state | still)
    player.step(np.array([[1.0, -1.0], [1.0, 0.0], [1.0, 1.0]]))
    np.testing.assert_allclose(player.state["spin"] / 0.15, [0.5, 1.0, 1.5])


def test_actions_come_late_and_are_seen_waiting() -> None:
    world = Pendulum(delay=2)
    assert world.observation.shape == (5,)
    envs, plain = batch(world, 1), batch(Pendulum(), 1)
    for late, now in ((1.0, 0.0), (-2.0, 0.0), (0.5, 1.0), (0.0, -2.0)):
        envs.step(np.array([[late]]))
        plain.step(np.array([[now]]))
        np.testing.assert_array_equal(envs.observations[:, :3], plain.observations)
    assert envs.observations[0, 3:].tolist() == [0.5, 0.0]
    pushed = batch(Cartpole(delay=1), 1)
    pushed.step(np.array([1]))
    assert pushed.observations[0, 4:].tolist() == [1.0]


def test_observations_come_late() -> None:
    envs, plain = batch(Cartpole(late=2), 1), batch(Cartpole(), 1)
    seen = [plain.observations[0]]
    for action in (1, 0, 1, 1):
        envs.step(np.array([action]))
        plain.step(np.array([action]))
        seen.append(plain.observations[0])
        np.testing.assert_array_equal(envs.observations[0], seen[max(0, len(seen) - 3)])


def test_a_chunk_is_its_actions_one_by_one() -> None:
    world = Cartpole(chunk=3)
    assert world.action == MultiDiscrete((2, 2, 2))
    envs, plain = batch(world, 1), batch(Cartpole(), 1)
    step = envs.step(np.array([[1, 0, 1]]))
    for action in (1, 0, 1):
        plain.step(np.array([action]))
    np.testing.assert_array_equal(envs.observations, plain.observations)
    assert step.reward.tolist() == [3.0]


def test_a_chunk_earns_nothing_after_its_end() -> None:
    envs = batch(Cartpole(chunk=3), 2)
    bodies = np.zeros((2, 4))
    bodies[0] = (0, 0, 0.2, 2.0)  # leans past 12° in the first of the three
    envs.reset_to(np.arange(2), {"body": bodies})
    step = envs.step(np.ones((2, 3), np.int64))
    assert step.reward.tolist() == [1.0, 3.0]
    assert step.terminated.tolist() == [True, False]
    assert envs.state["body"][0, 2] == pytest.approx(0.2 + 0.02 * 2.0)


def test_wrappers_nest() -> None:
    world = Pendulum(vary=0.1, adversary=0.2, delay=1, late=1, chunk=2)
    assert world.action == Box((2, 1), (-2.0, -2.0), (2.0, 2.0))
    envs = batch(world)
    envs.step(np.zeros((3, 2, 1)))
    assert envs.observations.shape == (3, 4)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"vary": 1.0}, "cartpole.vary must be from 0 up to 1, not 1."),
        ({"chunk": 0}, "cartpole.chunk must be from 1 to 1000, not 0."),
        ({"delay": -1}, "cartpole.delay must be from 0 to 1000, not -1."),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        Cartpole(**settings)


@pytest.mark.parametrize("world", [Cartpole(), Pendulum(), Acrobot(), Mountaincar()])
def test_pictures_show_what_moves(world: Physical) -> None:
    envs = batch(world, 1)
    first = envs.render(0)
    assert first.dtype == np.uint8
    assert first.shape[1:] == (240, 3)
    for _ in range(20):
        envs.step(envs.dynamics.expert(envs.state))
    assert (envs.render(0) != first).any(-1).mean() > 0.005
