"""GRPO as published."""

from __future__ import annotations

import statistics

import torch
from kit import Slow, assert_same, gradient, ragged, rows_of, values_of

from panoply.compose import resolve
from panoply.methods.base.grpo import grpo
from panoply.slots.credit.groups import group
from panoply.slots.reduce.averages import sequence_mean, token_mean
from panoply.slots.regularise.terms import kl
from panoply.slots.surrogate.ratios import clip


def test_parts() -> None:
    method = grpo()
    assert method.credit == group(baseline="mean", scale="std")
    assert method.surrogate == clip(low=0.2, high=0.2)
    assert method.regularise == (kl(weight=0.04, estimator="k3"),)
    assert method.reduce == sequence_mean()


def test_tiny_preset() -> None:
    tiny = resolve("grpo", preset="tiny").method.slots()
    assert (tiny["surrogate"], tiny["regularise"], tiny["reduce"]) == (clip(high=0.28), (), token_mean())


def test_gradient_is_the_papers() -> None:
    """Equations 3 and 4 of arXiv 2402.03300, one token at a time."""
    made, slow = ragged(drift=0.4), Slow()
    returns = {e: sum(r["reward"] for r in rows_of(made, episode=e)) for e in values_of(made, "episode")}
    loss = torch.zeros((), dtype=torch.float64)
    for g in values_of(made, "group"):
        members = sorted({r["episode"] for r in rows_of(made, group=g)})
        inside = [returns[e] for e in members]
        mean, deviation = statistics.fmean(inside), statistics.stdev(inside) if len(inside) > 1 else 0.0
        for e in members:
            advantage = (returns[e] - mean) / (deviation + 1e-4) if len(set(inside)) > 1 else 0.0
            rows = rows_of(made, episode=e)
            for row in rows:
                logp = slow.logp(row["state"], row["action"])
                rho = (logp - row["logp"]).exp()
                gain = torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)
                away = row["logp@reference"] - logp
                k3 = away.exp() - away - 1
                loss = loss - (gain - 0.04 * k3) / len(rows) / len(returns)
    method = grpo()
    made = made.with_columns(advantage=method.credit(made))
    assert_same(gradient(method, made), slow.gradient(loss))
