"""Preferences over pieces of episodes."""

from __future__ import annotations

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.worlds.control.pendulum import Pendulum
from panoply.worlds.logged.behaviour import behave
from panoply.worlds.logged.preferences import preferences

DATA = behave(Pendulum(horizon=40), "noisy", 2000, 0)


def margins(sharpness: float, flip: float = 0.0, pairs: int = 2000) -> np.ndarray:
    made = preferences(DATA, pairs, 10, sharpness=sharpness, flip=flip)
    earned = (DATA.columns["reward"].astype(np.float64)[rows].sum(-1) for rows in made)
    return next(earned) - next(earned)


def test_pieces_stay_within_their_episodes() -> None:
    made = preferences(DATA, 500, 10)
    for rows in made:
        assert (np.ptp(DATA.columns["episode"][rows], 1) == 0).all()
        assert (np.diff(DATA.columns["turn"][rows], axis=1) == 1).all()


def test_a_sharp_annotator_is_always_right_and_a_blunt_one_guesses() -> None:
    assert (margins(1e9) >= 0).all()
    assert (margins(0.0) > 0).mean() == pytest.approx(0.5, abs=0.04)
    assert (margins(1e9, flip=0.2) < 0).mean() == pytest.approx(0.2, abs=0.03)
    assert (margins(1e9, flip=1.0) <= 0).all()


def test_in_between_by_the_logistic_of_the_difference() -> None:
    differences = margins(0.05, pairs=20_000)
    near = np.abs(np.abs(differences) - 40) < 5
    assert (differences[near] > 0).mean() == pytest.approx(1 / (1 + np.exp(-2)), abs=0.03)


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(PanoplyError, match="No logged episode has 41 steps"):
        preferences(DATA, 10, 41)
    with pytest.raises(PanoplyError, match="flip is a probability"):
        preferences(DATA, 10, flip=2.0)
