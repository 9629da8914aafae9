"""Grid worlds: levels that can be solved, moves by hand, models against simulation and against Gymnasium's."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.control.grid import Grid
from panoply.worlds.control.levels import Layout
from panoply.worlds.control.simulated import Simulation
from panoply.worlds.control.world import Array, Box, Discrete

UP, RIGHT, DOWN, LEFT = range(4)


def batch(world: Grid, n: int = 1, seed: int = 0) -> Simulation:
    envs = world.envs(n)
    envs.reset(np.arange(n), np.arange(seed, seed + n))
    return envs


def put(envs: Simulation, **columns: Any) -> None:
    """Set columns of the only row."""
    envs.reset_to(np.arange(1), envs.state | {name: np.array([value]) for name, value in columns.items()})


def walk(envs: Simulation, actions: list[int]) -> list[Any]:
    return [envs.step(np.array([action])) for action in actions]


# ------------------------------------------------------------------ levels


@pytest.mark.parametrize("layout", ["open", "rooms", "maze", "scatter", "lake"])
def test_every_level_can_be_solved_and_is_always_the_same(layout: Layout) -> None:
    world = Grid(layout, counts=(2,), pays=(1.0,), ends=(0.5,))
    for number in range(30):
        made = world.made(number)
        assert (made.distance[:, made.start] > 0).all()
        assert not made.walls[[made.start, *made.places]].any()
        assert not made.holes[[made.start, *made.places]].any()
    world.made.__func__.__globals__["level"].cache_clear()  # type: ignore[attr-defined]
    np.testing.assert_array_equal(world.made(29).places, made.places)
    np.testing.assert_array_equal(world.made(29).walls, made.walls)


def test_four_rooms_have_four_doors() -> None:
    walls = Grid("rooms", size=9).made(3).walls.reshape(9, 9)
    assert walls[4].sum() == 7
    assert walls[:, 4].sum() == 7
    assert walls.sum() == 13


def test_a_maze_without_openings_is_a_tree() -> None:
    """16 rooms and 15 doors between them are open; each cell but the dug ones is a wall."""
    walls = Grid("maze", size=7, density=0.0).made(5).walls.reshape(7, 7)
    assert not walls[::2, ::2].any()
    assert (~walls).sum() == 16 + 15


def test_levels_that_cannot_be_are_refused() -> None:
    with pytest.raises(PanoplyError, match="fewer walls or objects would help"):
        Grid("scatter", density=1.0).made(0)


def test_levels_come_from_seeds_or_from_a_number_of_them() -> None:
    assert len(set(batch(Grid(), 100).state["level"].tolist())) == 100
    assert set(batch(Grid(levels=3), 100).state["level"].tolist()) == {0, 1, 2}
    assert set(batch(Grid(level=7), 100).state["level"].tolist()) == {7}


# ------------------------------------------------------------------ moving


def test_walls_and_edges_stop() -> None:
    envs = batch(Grid("rooms", size=5, level=0))
    envs.reset_to(np.arange(1), envs.state | {"at": np.array([0])})
    walk(envs, [UP, LEFT])
    assert envs.state["at"].tolist() == [0]
    walk(envs, [RIGHT, DOWN, LEFT, UP])
    assert envs.state["at"].tolist() == [0]
    walk(envs, [RIGHT, DOWN])
    assert envs.state["at"].tolist() == [6]
    walls = envs.state["walls"][0]
    assert walls.sum() == 5
    assert not walls[envs.state["next"][0][~walls]].any()


def test_objects_pay_end_and_are_gone() -> None:
    world = Grid(
        "open", size=4, counts=(1, 1), pays=(1.0, -0.5), ends=(1.0, 0.0), returns=(0.0, 0.0), cost=0.1
    )
    envs = batch(world)
    put(envs, at=0, places=[2, 1])
    first, second = walk(envs, [RIGHT, RIGHT])
    assert first.reward.tolist() == [pytest.approx(-0.6)]
    assert (first.terminated[0], first.signals["success"][0]) == (False, 0)
    assert envs.state["present"].tolist() == [[False, False]]
    assert second.reward.tolist() == [pytest.approx(0.9)]
    assert (second.terminated[0], second.signals["success"][0]) == (True, 1)


def test_objects_come_back() -> None:
    world = Grid("open", size=4, ends=(0.0,), returns=(1.0,))
    envs = batch(world)
    put(envs, at=0, places=[1])
    rewards = [step.reward[0] for step in walk(envs, [RIGHT, LEFT, RIGHT])]
    assert rewards == [1, 0, 1]


def test_holes_end_and_slips_go_aside() -> None:
    envs = batch(Grid("lake", size=4, counts=(1,), level=0))
    put(envs, at=1)
    assert walk(envs, [DOWN])[0].terminated.tolist() == [True]
    slippery = batch(Grid("open", size=5, slip=2 / 3, level=0), 9000)
    slippery.reset_to(np.arange(9000), slippery.state | {"at": np.full(9000, 12)})
    slippery.step(np.full(9000, RIGHT))
    shares = np.bincount(slippery.state["at"], minlength=25) / 9000
    np.testing.assert_allclose(shares[[7, 13, 17]], 1 / 3, atol=0.02)
    assert shares[11] == 0


def test_the_lake_is_gymnasiums() -> None:
    """The best values of FrozenLake-v1 from its own table, discounted by 0.99."""
    table = gymnasium.make("FrozenLake-v1", is_slippery=True).unwrapped.P  # type: ignore[attr-defined]
    values = np.zeros(16)
    for _ in range(2000):
        for s in range(16):
            values[s] = max(
                sum(p * (r + 0.99 * values[t] * (not done)) for p, t, r, done in table[s][a])
                for a in range(4)
            )
    ours = Grid("lake", size=4, slip=2 / 3, level=0).mdp.optimal(0.99).max(-1)
    ice = [s for s in range(15) if s not in (5, 7, 11, 12)]
    np.testing.assert_allclose(ours[16:32][ice], values[ice], atol=1e-9)
    assert ours[16] == pytest.approx(0.542, abs=1e-3)


def test_the_model_is_what_happens() -> None:
    world = Grid(
        "open", size=3, counts=(1, 1), pays=(1.0, -1.0), ends=(0.5, 0.0), returns=(0.0, 0.0), slip=0.4
    )
    world = Grid(**{**vars(world), "level": 2, "view": "state"})
    mdp, envs = world.mdp, batch(world, 20_000)
    assert mdp.states == 9 * 4 + 1
    at = envs.observations[0]
    step = envs.step(np.full(20_000, DOWN))
    to = np.where(step.terminated, 36, envs.observations)
    shares = np.bincount(to, minlength=37) / 20_000
    np.testing.assert_allclose(shares, mdp.transitions[at, DOWN], atol=0.015)
    assert step.reward.mean() == pytest.approx(mdp.reward[at, DOWN], abs=0.02)


def test_a_model_needs_a_fixed_level() -> None:
    assert "model" in Grid(level=0).access
    assert "model" not in Grid().access
    with pytest.raises(PanoplyError, match="An exact model needs a fixed grid.level"):
        Grid().mdp  # noqa: B018


def test_the_expert_takes_a_shortest_way() -> None:
    for layout in ("rooms", "maze", "lake"):
        world = Grid(layout)  # type: ignore[arg-type]
        envs = batch(world, 50)
        far = np.array([world.made(s).distance[0, world.made(s).start] for s in range(50)])
        taken, won, live = np.zeros(50), np.zeros(50), np.ones(50, bool)
        while live.any():
            step = envs.step(envs.dynamics.expert(envs.state))
            taken += live
            won += live * step.reward
            live &= ~(step.terminated | step.truncated)
        assert won.tolist() == [1] * 50
        np.testing.assert_array_equal(taken, far)


# ------------------------------------------------------------------ coverage


def test_ground_pays_once_and_the_modular_reward_again_and_again() -> None:
    """On 3 × 3 the middle sees five of nine cells; from a corner it is the three others it does not."""
    world = Grid("open", size=3, reward="coverage", ends=(0.0,), level=0)
    envs = batch(world)
    put(envs, at=4, covered=world._near[4])
    ground, total = world.ground.reshape(3, 3), world.ground.sum()
    assert world._near[4].reshape(3, 3).tolist() == [[0, 1, 0], [1, 1, 1], [0, 1, 0]]
    first, second, third = (step.reward[0] for step in walk(envs, [UP, DOWN, UP]))
    assert first == pytest.approx((ground[0, 0] + ground[0, 2]) / total)
    assert (second, third) == (0, 0)
    modular = batch(Grid("open", size=3, reward="modular", ends=(0.0,), level=0))
    put(modular, at=1)
    near = ground[0].sum() + ground[1, 1]  # the upper row and the middle
    paid = [step.reward[0] for step in walk(modular, [UP, UP])]
    assert paid == [pytest.approx(near / total)] * 2


def test_ground_alone_with_time_and_history() -> None:
    world = Grid("open", size=3, counts=(0,), level=0, view="vector", clock=True, history=True, horizon=4)
    envs = batch(world)
    put(envs, at=4, covered=world._near[0], time=0)
    step = walk(envs, [UP])[0]
    assert envs.observations[0].tolist() == [0, 0.5, 0.25, 1, 1, 1, 1, 1, 0, 0, 0, 0]
    assert step.signals["alone"][0] > step.signals["covered"][0] > 0
    table = Grid("open", size=3, counts=(0,), level=0, view="state", clock=True, horizon=4)
    assert table.observation == Discrete(9 * 5)
    envs = batch(table)
    put(envs, at=4, time=2)
    walk(envs, [UP])
    assert envs.observations[0] == 1 + 9 * 3


# ------------------------------------------------------------------ views


def view(world: Grid, **columns: Any) -> Array:
    envs = batch(world)
    put(envs, **columns)
    seen: Array = envs.observations[0]
    assert isinstance(world.observation, Discrete) or seen.shape == world.observation.shape
    return seen


def test_views_of_one_state() -> None:
    made: dict[str, Any] = {"layout": "open", "size": 3, "counts": (1, 1), "level": 0}
    made |= {"pays": (1.0, -1.0), "ends": (1.0, 1.0), "returns": (0.0, 0.0)}
    here: dict[str, Any] = {"at": 5, "places": [2, 6], "present": [True, False]}
    assert view(Grid(**made, view="state"), **here) == 5 + 9 * 1
    np.testing.assert_allclose(
        view(Grid(**made, view="vector"), **here), [0.5, 1.0, -0.5, 0.0, 1.0, 0.0, 0.0, 0.0], rtol=1e-6
    )
    categories = view(Grid(**made, view="categories"), **here)
    assert categories.tolist() == [1, 2, 5, 1, 0, 0, 1, 0]  # the first kind above, an edge to the right
    planes = view(Grid(**made), **here)
    assert planes[2].nonzero() == (np.array([1]), np.array([2]))
    assert planes[4].nonzero() == (np.array([0]), np.array([2]))
    assert not planes[5].any()
    pixels = view(Grid(**made, view="pixels", pixels=2), **here)
    assert pixels.shape == (3, 6, 6)
    assert 0 <= pixels.min() < pixels.max() <= 1
    assert (pixels[:, 2:4, 4:6] == pixels[:, 2:3, 4:5]).all()
    assert (pixels[:, 2, 4] != pixels[:, 0, 0]).any()


def test_distractors_move_and_mean_nothing() -> None:
    envs = batch(Grid("open", view="categories", distractors=10))
    assert envs.observations.shape == (1, 2 + 4 + 1 + 10)
    before = envs.observations[0, -10:].copy()
    walk(envs, [UP])
    assert (envs.observations[0, -10:] != before).any()
    assert set(envs.observations[0, -10:]) <= {0.0, 1.0, 2.0, 3.0}
    assert isinstance(Grid(view="pixels").observation, Box)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"pays": (1.0, 2.0)}, "have one number for each kind of object"),
        ({"layout": "maze", "size": 6}, "is odd for a maze"),
        ({"view": "state", "counts": (9,)}, "for at most 8 objects"),
        ({"view": "planes", "clock": True}, "for the views vector and state"),
        ({"view": "state", "history": True}, "grid.history for vector"),
        ({"view": "state", "clock": True, "horizon": None}, "needs a grid.horizon"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PanoplyError, match=sentence):
        Grid(**settings)


def test_states_recur_by_level_place_and_objects() -> None:
    envs = batch(Grid("open", size=5, ends=(0.0,), level=4))
    put(envs, at=12, places=[3])
    start = envs.keys()
    walk(envs, [DOWN, UP])
    assert envs.keys() == start
    put(envs, present=[False])
    assert envs.keys() != start


def test_pictures_show_what_moves() -> None:
    for reward in ("objects", "coverage"):
        envs = batch(Grid(reward=reward, distractors=1))  # type: ignore[arg-type]
        before = envs.render(0)
        assert before.shape == (240, 240, 3)
        walk(envs, [int(envs.dynamics.expert(envs.state)[0])])
        assert (envs.render(0) != before).any()
