"""TQ, SACo and what methods reach: the correlations by hand, and the whole protocol on a run too small to learn."""

from __future__ import annotations

from pathlib import Path

import pytest

from panoply.methods.generative_offline import dataset_perspective as of


def test_correlation() -> None:
    """1, 2, 4 and 2, 2, 5 lie −4/3, −1/3, 5/3 and −1, −1, 2 from their means: 5/√(14/3 · 6)."""
    assert of.pearson([1, 2, 4], [2, 2, 5]) == pytest.approx(5 / (14 / 3 * 6) ** 0.5)
    assert of.pearson([1, 2, 4], [3, 3, 3]) == 0


def test_the_least_of_what_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """BC follows TQ and DQN follows SACo, neither as much the other; what CQL follows is told and decides nothing."""
    tq, saco = [0.0, 1.0, 0.2, 0.9], [1.0, 0.1, 0.9, 1.0]
    rows = zip("abcd", tq, saco, strict=True)
    made = {
        mix: {"tq": t, "saco": s, "bc": t, "dqn": s, "cql": t + 0.5 * s, "crr": t + 0.5 * s}
        for mix, t, s in rows
    }
    monkeypatch.setattr(of, "performances", lambda seed: made)
    found = of.measure(0)
    between = of.pearson(tq, saco)
    assert found["bc with TQ"] == found["dqn with SACo"] == pytest.approx(1)
    assert found["bc with SACo"] == found["dqn with TQ"] == pytest.approx(between)
    assert next(iter(found.values())) == pytest.approx(1 - between)
    assert found["cql with SACo"] < 0


def test_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """240 random steps of an untrained policy that happens to be better than chance, and one pass of imitation."""
    monkeypatch.setenv("PANOPLY_CACHE", str(tmp_path))
    small = {"policy.hidden": (4,), "run.steps": 1, "run.evaluate_every": 1, "run.held_out": 4}
    monkeypatch.setattr(of, "METHODS", {"bc": ("bc", {**small, "update.minibatches": 2})})
    online = {"sample.envs": 2, "sample.length": 120, "sample.random": 240, "replay.warmup": 1000, **small}
    monkeypatch.setattr(of, "MIXES", ("random", "expert", "replay"))
    found = of.performances(2, size=100, online=online)
    assert list(found) == ["random", "expert", "replay"]
    assert found["replay"]["saco"] == found["replay"]["lsaco"] == 1
    assert found["expert"]["tq"] > found["random"]["tq"]
    assert all(isinstance(each["bc"], float) for each in found.values())
