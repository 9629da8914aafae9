"""What is remembered: n-step returns worked by hand, with episodes that end, are cut, and are still going on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from panoply.experience import Experience, Table
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.policies.heads import head_for
from panoply.replay import Replay
from panoply.rollout.stepping import StepBuffer
from panoply.slots.replay.uniform import uniform
from panoply.worlds.control.world import Box, Discrete

SEES, ACTS = Box((1,)), Box((1,), (-2.0,), (2.0,))


def write(replay: Replay, seen: float, action: float, reward: float, end: str, after: float) -> None:
    buffer = StepBuffer(1, 1)
    buffer.write("observation", np.array([[seen]], np.float32))
    buffer.write("acted", np.array([[action]], np.float32))
    buffer.write("reward", np.array([reward]))
    buffer.write("terminated", np.array([end in ("terminated", "both")]))
    buffer.write("truncated", np.array([end in ("truncated", "both")]))
    buffer.write("after", np.array([[after]], np.float32))
    buffer.advance()
    replay.add(buffer)


def filled(steps: int, size: int = 8) -> Replay:
    """Three steps to a terminal state, two that are cut, and two of an episode that goes on."""
    replay = Replay(SEES, ACTS, head_for(ACTS), size=size, steps=steps, gamma=0.5)
    for row in [
        (0, -2.0, 1.0, "", 1),
        (1, 0.0, 2.0, "", 2),
        (2, 2.0, 4.0, "terminated", 3),
        (10, 0.0, 8.0, "", 11),
        (11, 0.0, 16.0, "truncated", 12),
        (20, 0.0, 32.0, "", 21),
        (21, 0.0, 64.0, "", 22),
    ]:
        write(replay, *row)
    return replay


def test_one_step() -> None:
    rows = filled(1).rows(torch.arange(7))
    assert rows.reward.tolist() == [1, 2, 4, 8, 16, 32, 64]
    assert rows.discount.tolist() == [
        0.5,
        0.5,
        0.0,
        0.5,
        0.5,
        0.5,
        0.5,
    ]  # a cut episode is still worth something
    assert rows.next_observation[:, 0].tolist() == [1, 2, 3, 11, 12, 21, 22]
    assert rows.action[:3, 0].tolist() == [-1, 0, 1]  # units of the bounds


def test_three_steps() -> None:
    """r + r′/2 + r″/4, as far as the episode went; γ^k of the k steps counted."""
    rows = filled(3).rows(torch.arange(7))
    assert rows.reward.tolist() == [1 + 1 + 1, 2 + 2, 4, 8 + 8, 16, 32 + 32, 64]
    assert rows.discount.tolist() == [0, 0, 0, 0.25, 0.5, 0.25, 0.5]
    assert rows.next_observation[:, 0].tolist() == [3, 3, 3, 12, 12, 22, 22]


def test_chunks() -> None:
    """Three steps in a row; where the episode ended, was cut or has not gone on yet, its last step stands again."""
    replay = Replay(SEES, ACTS, head_for(ACTS), size=8, chunk=3, gamma=0.5)
    replay.load_state(filled(1).state())
    rows = replay.rows(torch.arange(7))
    chunk = rows.chunk
    assert chunk is not None
    assert chunk.observation[:, :, 0].tolist() == [
        [0, 1, 2],
        [1, 2, 2],
        [2, 2, 2],
        [10, 11, 11],
        [11, 11, 11],
        [20, 21, 21],
        [21, 21, 21],
    ]
    assert chunk.inside.sum(1).tolist() == [3, 2, 1, 2, 1, 2, 1]
    assert chunk.action[0, :, 0].tolist() == [-1, 0, 1]
    assert chunk.reward.tolist()[:2] == [[1, 2, 4], [2, 4, 0]]
    assert chunk.discount.tolist()[:5] == [
        [0.5, 0.5, 0],
        [0.5, 0, 0],
        [0, 0, 0],
        [0.5, 0.5, 0.5],
        [0.5, 0.5, 0.5],
    ]
    assert chunk.next_observation[3, :, 0].tolist() == [11, 12, 12]
    assert rows.reward.tolist() == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
    ]  # a transition itself is of n_step steps as before
    assert filled(1).rows(torch.arange(7)).chunk is None


def test_chunks_are_not_drawn_over_the_newest_step() -> None:
    replay = Replay(SEES, ACTS, head_for(ACTS), size=4, chunk=3, gamma=0.5)
    replay.load_state(filled(1, size=4).state())
    chunk = replay.rows(torch.arange(4)).chunk
    assert chunk is not None
    assert chunk.observation[:, :, 0].tolist() == [[11, 11, 11], [20, 21, 21], [21, 21, 21], [10, 11, 11]]


def test_overwritten() -> None:
    """The oldest steps go first, and a window never runs from the newest step into the oldest."""
    replay = filled(2, size=4)
    assert len(replay) == 4
    rows = replay.rows(torch.arange(4))  # in the order of their places: steps 4, 5, 6 and 3
    assert rows.observation[:, 0].tolist() == [11, 20, 21, 10]
    assert rows.reward.tolist() == [16, 32 + 32, 64, 8 + 8]
    assert rows.discount.tolist() == [0.5, 0.25, 0.5, 0.25]


def test_what_ends_at_its_time_limit_has_ended() -> None:
    replay = Replay(SEES, ACTS, head_for(ACTS), size=1, gamma=0.5)
    write(replay, 0, 0.0, 1.0, "both", 1)
    assert replay.rows(torch.tensor([0])).discount.tolist() == [0.0]


def test_several_environments() -> None:
    """Windows stay in their environment."""
    replay = Replay(Discrete(9), Discrete(2), head_for(Discrete(2)), size=100, envs=2, steps=2, gamma=0.5)
    for t in range(3):
        buffer = StepBuffer(2, 1)
        columns = {"observation": [t, 4 + t], "acted": [0, 1], "after": [t + 1, 5 + t]}
        columns |= {"reward": [1, 10], "terminated": [False, t == 1], "truncated": [False, False]}
        for name, values in columns.items():
            buffer.write(name, np.array(values))
        buffer.advance()
        replay.add(buffer)
    rows = replay.rows(torch.arange(6))
    assert rows.observation.tolist() == [0, 4, 1, 5, 2, 6]
    assert rows.reward.tolist() == [1.5, 15.0, 1.5, 10.0, 1.0, 10.0]
    assert rows.discount.tolist() == [0.25, 0.0, 0.25, 0.0, 0.5, 0.5]
    assert rows.next_observation.tolist() == [2, 6, 3, 6, 3, 7]


def masked(steps: int) -> Replay:
    """Three steps in which one of two actions is legal, and another at the end."""
    replay = Replay(Discrete(4), Discrete(2), head_for(Discrete(2)), size=8, steps=steps, gamma=0.5)
    for t in range(3):
        buffer = StepBuffer(1, 1)
        columns = {"observation": [t], "acted": [t % 2], "after": [t + 1], "reward": [1.0]}
        columns |= {"terminated": [False], "truncated": [t == 2]}
        columns |= {"legal": [[t % 2 == 0, t % 2 == 1]], "legal_after": [[t % 2 == 1, t % 2 == 0]]}
        for name, values in columns.items():
            buffer.write(name, np.array(values))
        buffer.advance()
        replay.add(buffer)
    return replay


def test_what_is_legal() -> None:
    """Masks are those of the states: of s at the first step of a window, of s′ after its last."""
    one, two = (masked(steps).rows(torch.arange(3)) for steps in (1, 2))
    assert one.legal is not None
    assert one.next_legal is not None
    assert two.next_legal is not None
    assert one.legal.tolist() == [[True, False], [False, True], [True, False]]
    assert one.next_legal.tolist() == [[False, True], [True, False], [False, True]]
    assert two.next_legal.tolist() == [[True, False], [False, True], [False, True]]
    again = Replay(Discrete(4), Discrete(2), head_for(Discrete(2)), size=8, gamma=0.5)
    again.load_state(masked(1).state())
    found = again.rows(torch.arange(3))
    assert found.next_legal is not None
    assert torch.equal(found.next_legal, one.next_legal)
    assert filled(1).rows(torch.arange(7)).legal is None


def test_saved() -> None:
    replay, again = filled(3), Replay(SEES, ACTS, head_for(ACTS), size=8, steps=3, gamma=0.5)
    again.load_state(replay.state())
    for name in ("observation", "action", "reward", "discount", "next_observation"):
        generator = torch.Generator().manual_seed(0)
        one = getattr(replay.draw(32, generator), name)
        other = getattr(again.draw(32, generator.manual_seed(0)), name)
        assert torch.equal(one, other)


@pytest.mark.parametrize("steps", [1, 3])
def test_uniform(steps: int) -> None:
    drawn = filled(steps).draw(7000, torch.Generator().manual_seed(0))
    counts = torch.unique(drawn.observation, return_counts=True)[1]
    assert len(counts) == 7
    assert counts.min() > 880  # 1000 expected, with a deviation of 29


# ------------------------------------------------------------------ the memory of replay.uniform


def test_own_steps_have_as_much_room_as_is_asked_for_or_as_the_run_can_fill() -> None:
    policy = ControlPolicy.fresh(SEES, ACTS, PolicySpec(hidden=()), seed=0)
    for most, room in ((100, 6), (4, 2)):
        memory = uniform(size=12)(policy, 0)
        memory.begin(2, most)
        assert (memory.held.room, memory.held.envs, len(memory)) == (room, 2, 0)


def test_logged_data_is_drawn_from_alone_or_beside_own_steps() -> None:
    """An expert's share is that of the logged rows, and the logged share that of a draw."""
    seen = Table({"observation": torch.zeros(3, 1)})
    columns = {"context": torch.arange(2), "next": torch.arange(1, 3), "episode": torch.zeros(2).long()}
    columns |= {"action": torch.zeros(2, 1), "end": torch.tensor([0, 1]), "signal:reward": torch.ones(2)}
    given = Experience(Table(columns | {"expert": torch.tensor([True, False])}), seen)
    policy = ControlPolicy.fresh(SEES, ACTS, PolicySpec(hidden=()), seed=0)
    alone, beside = (uniform(size=4, experts=1.0, logged=0.25)(policy, 0) for _ in range(2))
    alone.add(given)
    assert alone.draw(8, torch.Generator()).more["expert"].all()
    beside.begin(1, 4)
    beside.add(given)
    assert (beside.held.logged.experts, beside.held.share, beside.held.own.room) == (1.0, 0.25, 4)
