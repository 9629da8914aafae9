"""ARIES: schedules, votes, and a comparison on the same problems."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from panoply.errors import PanoplyError
from panoply.methods.agents.aries import aries, follow, played, schedule, schedules, votes
from panoply.worlds.control.thoughts import AGAIN, FINISH, MERGE, REFINE, SOLVE, SPLIT, Thoughts


def test_schedules_are_whole_and_in_time() -> None:
    ways = schedules(8)
    assert schedule(1, 1, 1, 0) == (SPLIT, SOLVE, SOLVE, AGAIN, AGAIN, MERGE, REFINE, FINISH)
    assert (SOLVE, FINISH) in ways
    assert len(set(ways)) == len(ways)
    assert max(map(len, ways)) == 9  # eight calls, and the end
    for way in ways:
        row = played(Thoughts(calls=8), follow(way), 8, 0)
        assert row["calls"] == len(way) - 1
        assert row["error"] < 1  # all of them finish


def test_all_meet_the_same_problems() -> None:
    once = played(Thoughts(), follow((SOLVE, FINISH)), 200, 3)
    assert once == played(Thoughts(), follow((SOLVE, FINISH)), 200, 3)
    assert once["right"] == pytest.approx(np.mean(np.exp(-np.array([16, 32, 48, 64]) / 16)), abs=0.06)


class Says:
    """A policy with fixed logits."""

    def model(self, seen: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0.0, 1.0, 2.0, 0.0, 0.0, 9.0]).expand(len(seen), -1)


def test_votes_are_of_what_is_legal() -> None:
    legal = np.array([[True, True, True, False, False, False]] * 2000)
    seen = np.zeros((2000, 16), np.float32)
    assert (votes(Says(), 0, 0)(seen, legal, 0) == REFINE).all()
    shares = [np.mean(votes(Says(), n, 0)(seen, legal, 0) == REFINE) for n in (1, 15)]
    assert shares[0] == pytest.approx(np.exp(2) / (1 + np.e + np.exp(2)), abs=0.03)
    assert shares[1] > 0.9 > shares[0] + 0.2  # most of fifteen hardly ever err


def test_a_comparison_has_every_row() -> None:
    found = aries(steps=1, episodes=20, calls=4, seed=1001)
    assert list(found) == ["learned", "learned, 15 votes", "best schedule", "by chance"]
    assert found["learned"]["search"] == 16 * 128
    assert found["best schedule"]["search"] > 0 == found["by chance"]["search"]
    with pytest.raises(PanoplyError, match="a step to learn in"):
        aries(steps=0)
