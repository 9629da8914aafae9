"""V-trace: values by hand, a slow reference, and where it is the λ-return; actors that lag."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import hand

import panoply as pp
from panoply.errors import PanoplyError
from panoply.experience import TERMINATED, TRUNCATED
from panoply.progress import Progress
from panoply.run import Run
from panoply.slots.credit.gae import gae
from panoply.slots.credit.vtrace import traced, vtrace


def found(settings: dict[str, Any] | None = None, **columns: Any) -> tuple[list[float], list[float]]:
    """Two decisions with rewards 1 and 2, values 2 and 4, and ratios 2 and ½."""
    made = {
        "reward": [1.0, 2.0],
        "value": [2.0, 4.0],
        "end": [0, TERMINATED],
        "logp": [-1.0, -1.0],
        "logp@old": [-1.0 + math.log(2), -1.0 - math.log(2)],
        **columns,
    }
    credit = vtrace(**{"gamma": 0.5, **(settings or {})})(hand(episode=[3, 3], **made))
    return credit["target"].tolist(), credit["advantage"].tolist()


def test_golden() -> None:
    """ρ = 1, ½: δ = 1 + ½·4 − 2 = 1 and ½·(2 − 4) = −1. v = 4 − 1 = 3, then 2 + 1 + ½·1·(−1) = 2.5.

    Advantages: 1·(1 + ½·3 − 2) and ½·(2 − 4).
    """
    target, advantage = found()
    assert target == pytest.approx([2.5, 3.0])
    assert advantage == pytest.approx([0.5, -1.0])


def test_bounds() -> None:
    """ρ̄ = 4 counts the first error twice, c̄ = 4 lets the second one through twice, λ = ½ half as much."""
    assert found({"rho": 4.0})[0] == pytest.approx([2 + 2 * 1 - 0.5, 3.0])
    assert found({"rho": 4.0})[1] == pytest.approx([2 * 0.5, -1.0])
    assert found({"c": 4.0})[0] == pytest.approx([2 + 1 - 0.5 * 2, 3.0])
    assert found({"lam": 0.5})[0] == pytest.approx([2 + 1 - 0.25, 3.0])


def test_a_truncated_episode_goes_on_being_worth_something() -> None:
    """γ·V′ = ½·6 more at the end: δ = ½·(2 + 3 − 4) = ½; v′ stands for V′ there, too."""
    target, advantage = found(end=[0, TRUNCATED], next_value=[9.0, 6.0])
    assert target == pytest.approx([2 + 1 + 0.25, 4.5])
    assert advantage == pytest.approx([1 + 0.5 * 4.5 - 2, 0.5])


def test_of_own_decisions_targets_are_lambda_returns() -> None:
    """With ratios of 1, v is GAE's target, and A with λ = 1 GAE's advantage."""
    columns = {"reward": [1.0, 2.0], "value": [2.0, 4.0], "end": [0, TERMINATED], "logp": [-1.0, -1.0]}
    for lam in (1.0, 0.7):
        target, advantage = found({"lam": lam}, **{"logp@old": [-1.0, -1.0]})
        other = gae(gamma=0.5, lam=lam, normalise=False)(hand(episode=[3, 3], **columns))
        assert target == pytest.approx(other["target"].tolist())
        if lam == 1:
            assert advantage == pytest.approx(other["advantage"].tolist())


def test_interleaved_episodes_against_the_sum() -> None:
    """v_s = V_s + Σ_{t≥s} γ^(t−s)·(Π_{i<t} c_i)·ρ_t·(r_t + γV_{t+1} − V_t), in float64, straight from remark 1."""
    dice = torch.Generator().manual_seed(0)
    episode = torch.tensor([3, 1, 3, 3, 8, 1, 3, 8, 1, 1])
    reward, value, bootstrap = (torch.randn(10, generator=dice, dtype=torch.float64) for _ in range(3))
    ratio = torch.randn(10, generator=dice, dtype=torch.float64).exp()
    gamma, lam, rho, c = 0.9, 0.8, 1.2, 0.9
    aims, advantage = traced(reward, value, bootstrap, ratio, episode, gamma=gamma, lam=lam, rho=rho, c=c)
    for e in (1, 3, 8):
        rows = [i for i in range(10) if episode[i] == e]

        def after(values: torch.Tensor, at: int, rows: list[int] = rows) -> float:
            return float(values[rows[at + 1]] if at + 1 < len(rows) else bootstrap[rows[at]])

        for s, row in enumerate(rows):
            slow, reach = float(value[row]), 1.0
            for t in range(s, len(rows)):
                i = rows[t]
                error = min(rho, float(ratio[i])) * (
                    float(reward[i]) + gamma * after(value, t) - float(value[i])
                )
                slow += gamma ** (t - s) * reach * error
                reach *= lam * min(c, float(ratio[i]))
            assert float(aims[row]) == pytest.approx(slow, rel=1e-9)
            gain = float(reward[row]) + gamma * after(aims, s) - float(value[row])
            assert float(advantage[row]) == pytest.approx(min(rho, float(ratio[row])) * gain, rel=1e-9)


# ------------------------------------------------------------------ stale data


def test_a_run_with_lagging_actors_goes_on_with_the_same_earlier_self(tmp_path: Path) -> None:
    """The ratio at the first update is not 1; stopped after three steps and resumed, it ends at the same weights."""
    small = {
        "sample.envs": 4,
        "sample.length": 8,
        "sample.by": "past:2",
        "run.held_out": 2,
        "run.checkpoint_every": 3,
    }
    quiet: dict[str, Any] = {"threads": 1, "progress": Progress()}
    whole = pp.train("impala", "cartpole", run=tmp_path / "whole", steps=6, settings=small, **quiet)
    rows = Run.open(whole.run).metrics()
    assert max(row["step0_gap"] for row in rows) < 1e-5, "each decision is compared with who made it"
    assert rows[0]["step0_ratio_max"] == pytest.approx(1, abs=1e-5)
    assert max(row["step0_ratio_max"] for row in rows[1:]) > 1.0001
    with pp.steps("impala", "cartpole", run=tmp_path / "cut", steps=6, settings=small, **quiet) as steps:
        next(steps), next(steps), next(steps)
    again = pp.train(resume=tmp_path / "cut", progress=Progress())
    assert again.fingerprint == whole.fingerprint


def test_correcting_twice_is_refused() -> None:
    with pytest.raises(PanoplyError, match=r"surrogate.against=old"):
        pp.plan("ppo", "cartpole", credit="vtrace")
    plan = pp.plan("ppo", "cartpole", credit="vtrace", settings={"surrogate.against": "old"})
    assert plan.method.credit.info.name == "vtrace"
