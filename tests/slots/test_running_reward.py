"""Rewards over the running deviation of returns, against a plain loop over two batches."""

from __future__ import annotations

import numpy as np
import pytest
from kit import hand

from panoply.experience import OPEN, TERMINATED
from panoply.slots.reward.running import over_deviation

BATCHES = [
    # episode, turn, reward, end: episode 0 goes on from the first batch into the second
    ([0, 0, 1, 1], [0, 1, 0, 1], [1.0, 2.0, 3.0, -1.0], [OPEN, OPEN, OPEN, TERMINATED]),
    ([0, 0, 2], [2, 3, 0], [4.0, 0.5, 1.0], [OPEN, TERMINATED, OPEN]),
]


def test_two_batches_by_a_plain_loop() -> None:
    gamma, held = 0.5, over_deviation(gamma=0.5, limit=1.9)
    state, carried, seen = held.info.state(), {}, []  # type: ignore[misc]
    for episode, turn, reward, end in BATCHES:
        columns = {"turn": turn, "signal:success": reward, "end": end}
        state, found = held(state, hand(episode=episode, **columns))
        for e, r in zip(episode, reward, strict=True):
            carried[e] = r + gamma * carried.get(e, 0.0)
            seen.append(carried[e])
        expected = np.clip(np.array(reward) / (np.std(seen) + 1e-9), -1.9, 1.9)
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert state["open"] == {"2": pytest.approx(1.0)}
    assert seen == pytest.approx([1, 2.5, 3, 0.5, 5.25, 3.125, 1])
