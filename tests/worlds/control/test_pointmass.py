"""A point in the plane: steps, walls, pushes and costs by hand; experts who succeed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.control.arenas import blocked
from panoply.worlds.control.pointmass import Pointmass
from panoply.worlds.control.simulated import Simulation
from panoply.worlds.control.world import Array

VARIANTS = ("reach", "push", "umaze", "rooms", "routes", "goals")


def batch(world: Pointmass, n: int = 1) -> Simulation:
    envs = world.envs(n)
    envs.reset(np.arange(n), np.arange(n))
    return envs


def put(envs: Simulation, **columns: Any) -> None:
    envs.reset_to(np.arange(1), envs.state | {name: np.array([value]) for name, value in columns.items()})


def go(envs: Simulation, *action: float) -> Any:
    return envs.step(np.array([action]))


def play(world: Pointmass, n: int = 60) -> tuple[Array, Array, Simulation]:
    """Success, and everywhere the expert was."""
    envs, live, won, seen = batch(world, n), np.ones(n, bool), np.zeros(n), []
    while live.any():
        step = envs.step(envs.dynamics.expert(envs.state))
        won += live * step.signals["success"]
        seen.append(np.where(live[:, None], envs.state["at"], np.nan))
        live &= ~(step.terminated | step.truncated)
    return won, np.stack(seen), envs


def test_a_step_by_hand() -> None:
    envs = batch(Pointmass())
    put(envs, at=[0.0, 0.0], goal=[0.6, 0.0])
    step = go(envs, 1.0, -5.0)
    np.testing.assert_allclose(envs.state["at"], [[0.1, -0.1]])
    np.testing.assert_allclose(envs.observations, [[0.1, -0.1, 0.1, -0.1, 0.6, 0.0]], rtol=1e-6)
    assert step.reward[0] == pytest.approx(-np.hypot(0.5, 0.1))
    put(envs, at=[0.45, 0.0])
    step = go(envs, 1.0, 0.0)
    assert step.terminated.tolist() == [True]
    assert step.signals["success"].tolist() == [1]


def test_inertia_keeps_velocity() -> None:
    envs = batch(Pointmass(inertia=0.5))
    put(envs, at=[0.0, 0.0], goal=[0.9, 0.9])
    go(envs, 1.0, 0.0)
    np.testing.assert_allclose(envs.state["at"], [[0.05, 0.0]])
    go(envs, 0.0, 0.0)
    np.testing.assert_allclose(envs.state["at"], [[0.075, 0.0]])


def test_walls_and_edges_stop_and_let_slide() -> None:
    envs = batch(Pointmass("umaze"))
    put(envs, at=[-0.5, -0.15])
    go(envs, 1.0, 1.0)
    np.testing.assert_allclose(envs.state["at"], [[-0.4, -0.15]])
    put(envs, at=[0.98, -0.5])
    go(envs, 1.0, 0.0)
    np.testing.assert_allclose(envs.state["at"], [[1.0, -0.5]])


def test_a_puck_gives_way() -> None:
    """The agent comes to 0.12 of the puck, which is moved to 0.18 of it, straight ahead."""
    envs = batch(Pointmass("push"))
    put(envs, at=[0.0, 0.0], puck=[0.22, 0.0], goal=[0.5, 0.0])
    step = go(envs, 1.0, 0.0)
    np.testing.assert_allclose(envs.state["puck"], [[0.28, 0.0]])
    assert step.reward[0] == pytest.approx(-0.22)


def test_rewards_dense_sparse_and_at_the_end() -> None:
    paid = {}
    for reward in ("dense", "sparse", "episodic"):
        envs = batch(Pointmass(reward=reward))  # type: ignore[arg-type]
        put(envs, at=[0.0, 0.0], goal=[0.35, 0.0])
        paid[reward] = [float(go(envs, 1.0, 0.0).reward[0]) for _ in range(3)]
    assert paid["sparse"] == [0, 0, 1]
    assert paid["dense"] == pytest.approx([-0.25, -0.15, -0.05])
    assert paid["episodic"] == pytest.approx([0, 0, -0.45])
    late = batch(Pointmass(reward="episodic", horizon=2))
    put(late, at=[0.0, 0.0], goal=[0.9, 0.0])
    assert [float(go(late, 0.0, 0.0).reward[0]) for _ in range(2)] == pytest.approx([0, -1.8])


def test_danger_costs_and_may_be_fatal() -> None:
    for fatal in (False, True):
        envs = batch(Pointmass(hazard=0.2, fatal=fatal))
        put(envs, at=[0.0, 0.0], danger=[0.25, 0.0], goal=[0.5, 0.0])
        step = go(envs, 1.0, 0.0)
        assert step.signals["cost"].tolist() == [1]
        assert step.terminated.tolist() == [fatal]
        put(envs, at=[-0.2, 0.0])
        assert go(envs, 0.0, 0.0).signals["cost"].tolist() == [0]


def test_contexts_turn_actions_and_are_seen() -> None:
    envs = batch(Pointmass(contexts=4))
    put(envs, at=[0.0, 0.0], context=1)
    go(envs, 1.0, 0.0)
    np.testing.assert_allclose(envs.state["at"], [[0.0, 0.1]], atol=1e-12)
    assert envs.observations[0, 6:].tolist() == [0, 1, 0, 0]


def test_goals_lie_in_their_sector() -> None:
    goals = batch(Pointmass(sector=90), 500).state["goal"]
    turns = np.degrees(np.arctan2(goals[:, 1], goals[:, 0]))
    assert -45 < turns.min() < -40
    assert 40 < turns.max() < 45


@pytest.mark.parametrize("variant", VARIANTS)
def test_experts_succeed_without_touching_walls(variant: Any) -> None:
    world = Pointmass(variant)
    won, seen, _ = play(world)
    assert won.mean() == 1
    assert not blocked(world.arena, seen).any()


def test_demonstrations_have_two_modes_in_stated_shares() -> None:
    """Above or below the block, never through; the longer way is taken in a fifth of the episodes."""
    _, seen, envs = play(Pointmass("routes", upper=0.8), 200)
    extreme = np.where(np.nanmax(seen[..., 1], 0) > 0.4, 1, -1)
    assert ((envs.state["choice"] == 0) == (extreme == 1)).all()
    assert (extreme == 1).mean() == pytest.approx(0.8, abs=0.08)


def test_every_goal_of_many_is_shown_the_way_to() -> None:
    envs = batch(Pointmass("goals"), 100)
    reached, live = np.zeros(100), np.ones(100, bool)
    while live.any():
        step = envs.step(envs.dynamics.expert(envs.state))
        reached += live * step.signals["goal"]
        live &= ~(step.terminated | step.truncated)
    assert set(reached) == {1, 2, 3, 4, 5, 6}


def test_experts_know_constants_that_vary() -> None:
    assert play(Pointmass(vary=0.3, inertia=0.7))[0].mean() == 1


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(PanoplyError, match="pointmass.inertia must be from 0 up to 1"):
        Pointmass(inertia=1.0)
    with pytest.raises(PanoplyError, match="pointmass.upper must be from 0 to 1"):
        Pointmass(upper=1.5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_pictures_show_what_moves(variant: Any) -> None:
    envs = batch(Pointmass(variant, hazard=0.1))
    before = envs.render(0)
    go(envs, 1.0, 1.0)
    assert (envs.render(0) != before).any()
