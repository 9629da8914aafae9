"""Dual RL: losses by hand, gradients in float64, what V comes to in one state, and outliers."""

from __future__ import annotations

import math

import pytest
import torch
from actor_critics import Fixed, actor_critic, rows

import panoply as pp
from panoply.methods.generative_offline.dual_rl import (
    Divergence,
    best_value,
    dual_loss,
    dual_v,
    gumbel_loss,
    quantiles,
)
from panoply.policies.control import PolicySpec

GAPS = torch.tensor([2.0, 0.0, -1.0, -8.0], dtype=torch.float64)


def test_chi2() -> None:
    """λ = 0.75: ¾·(2 + 1) − ¼·2 = 1.75; below V nothing but −¼·x, even at −8, where x + x²/4 is 8."""
    assert dual_loss(GAPS, "chi2", 0.75).tolist() == [1.75, 0.0, 0.25, 2.0]


def test_total_variation() -> None:
    assert dual_loss(GAPS, "tv", 0.75).tolist() == [1.0, 0.0, 0.25, 2.0]


def test_gumbel() -> None:
    """z = x/2: e − 2, 0, e^−½ − ½, e^−4 + 3; rescaled, all times e^−1, the batch's largest z being 1."""
    plain = torch.tensor([math.e - 2, 0.0, math.exp(-0.5) - 0.5, math.exp(-4) + 3], dtype=torch.float64)
    torch.testing.assert_close(gumbel_loss(GAPS, 2.0, None), plain)
    torch.testing.assert_close(gumbel_loss(GAPS, 2.0, 7.0), plain * math.exp(-1))
    far = gumbel_loss(torch.tensor([2000.0, 0.0]), 1.0, 7.0)
    assert far.isfinite().all()
    assert not gumbel_loss(torch.tensor([2000.0, 0.0]), 1.0, None).isfinite().all()


@pytest.mark.parametrize("divergence", ["chi2", "tv", "reverse-kl"])
def test_gradient(divergence: Divergence) -> None:
    """dL/dV = −(λ·f̄′(x) − (1 − λ)) a row: f̄′ is (1 + x/2)·1(x > 0), 1(x > 0), and for XQL −(e^z − 1)/α·e^−top."""
    said = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64, requires_grad=True)
    who = actor_critic(PolicySpec(), v=lambda _: said)
    who.targets = {"q": Fixed([3.0, 2.5, 2.5], [4.0, 2.0, 7.0])}
    value, _ = dual_v(divergence=divergence, lam=0.8, temperature=2.0)(who, rows(3))
    (found,) = torch.autograd.grad(value.sum(), said)
    slopes = []
    for x in (2.0, -1.0, 0.5):
        if divergence == "reverse-kl":
            slopes.append(-(math.exp(x / 2) - 1) / 2 * math.exp(-1.0))
        else:
            rise = (1 + x / 2 if divergence == "chi2" else 1.0) if x > 0 else 0.0
            slopes.append(-(0.8 * rise - 0.2))
    torch.testing.assert_close(found, torch.tensor(slopes, dtype=torch.float64))


def test_a_quantile() -> None:
    """Q = 1 … 8 at λ = 0.77: at most (1 − 0.77)/0.77 = 0.299 of them may lie above V, which are two: V = 6."""
    qs = torch.arange(1.0, 9.0, dtype=torch.float64)
    assert best_value(qs, "tv", 0.77) == pytest.approx(6.0, abs=1e-9)
    assert best_value(qs, "tv", 0.98) == pytest.approx(8.0, abs=1e-9)


def test_chi2_balances() -> None:
    """Q = 0 and 4 at λ = ⅔, (1 − λ)/λ = ½: with V above 0 one row counts, ½·(1 + (4 − V)/2) = ½ at V = 4."""
    qs = torch.tensor([0.0, 4.0], dtype=torch.float64)
    assert best_value(qs, "chi2", 2 / 3) == pytest.approx(4.0, abs=1e-9)
    assert best_value(qs, "chi2", 0.6) == pytest.approx(4 - 2 * (2 * 0.4 / 0.6 - 1), abs=1e-9)


def test_the_identity() -> None:
    found = quantiles(3)
    assert found["largest violation"] < 1e-5
    assert found["V at 0.95, chi2"] <= 30.0
    assert found["Gumbel loss finite, values times 100"] == 0.0


def test_refused() -> None:
    with pytest.raises(pp.PanoplyError, match="quantile"):
        pp.plan("dual-rl", settings={"losses.dual_v.divergence": "tv", "losses.dual_v.lam": 0.4})
    with pytest.raises(pp.PanoplyError, match="a temperature instead"):
        pp.plan("xql", settings={"losses.dual_v.lam": 0.8})
    with pytest.raises(pp.PanoplyError, match="has lam instead"):
        pp.plan("dual-rl-tv", settings={"losses.dual_v.clip": 3.0})
