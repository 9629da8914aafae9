"""How many steps learners need, on the smallest problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from panoply.evidence import hardness
from panoply.evidence.hardness import MOST, PROBLEMS, Problem, predicted, steps_of_ppo, steps_of_sqirl

EASY, HARD = (
    {"variant": "lock", "size": depth, "actions": 2, "lure": 0.0, "horizon": depth} for depth in (2, 5)
)


def test_when_a_problem_is_solved() -> None:
    """A lock of two turns: acting at random opens it in a quarter of all cases, so 0.25 + 0.95·0.75 is enough."""
    assert Problem(EASY).mark == pytest.approx(0.9625)


def test_longer_locks_need_more() -> None:
    assert steps_of_sqirl(Problem(EASY), 0) * 8 < steps_of_sqirl(Problem(HARD), 0) < MOST
    assert steps_of_ppo(Problem(EASY), 0) <= steps_of_ppo(Problem(HARD), 0) < MOST


def test_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardness, "MOST", 20)
    assert steps_of_sqirl(Problem(HARD), 0) == 40
    assert steps_of_ppo(Problem({**HARD, "size": 9, "horizon": 9}), 0) == 40


def test_correlations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that rank as SQIRL's do are predicted perfectly; what is beyond is counted from the best of the rest."""
    steps = {2: 10, 5: 40, 3: 90}
    monkeypatch.setattr(hardness, "steps_of_ppo", lambda problem, seed: steps[problem.horizon])
    monkeypatch.setattr(hardness, "steps_of_sqirl", lambda problem, seed: 7 * steps[problem.horizon])
    found = predicted(0, (EASY, HARD, {**HARD, "size": 3, "horizon": 3}))
    assert found["correlation of SQIRL"] == pytest.approx(1)
    assert found["correlation of horizon"] == found["correlation of states"] == pytest.approx(0.5)
    assert next(iter(found.values())) == pytest.approx(0.4)


def test_the_problems_differ_and_can_be_built() -> None:
    every = [Problem(options) for options in PROBLEMS]
    assert len({tuple(sorted(options.items())) for options in PROBLEMS}) == len(every) == 20
    assert all(0 < problem.horizon <= 12 for problem in every)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(hardness.tempfile, "tempdir", None)
    steps_of_ppo(Problem(EASY), 0)
    assert list(tmp_path.iterdir()) == []
