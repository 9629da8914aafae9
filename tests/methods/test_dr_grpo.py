"""Dr. GRPO as published."""

from __future__ import annotations

import statistics

import torch
from kit import Slow, assert_same, gradient, ragged, rows_of
from papers import ZERO, groups_of, returns_of

from panoply.methods.base.dr_grpo import dr_grpo
from panoply.slots.reduce.averages import constant


def test_gradient_is_the_papers() -> None:
    """GRPO's equation with neither 1/std nor 1/|y| (arXiv 2503.20783, figure 1); L = 7."""
    made, slow, loss = ragged(drift=0.4), Slow(), ZERO
    returns = returns_of(made)
    for members in groups_of(made):
        mean = statistics.fmean(returns[e] for e in members)
        for e in members:
            for row in rows_of(made, episode=e):
                rho = (slow.logp(row["state"], row["action"]) - row["logp"]).exp()
                gain = torch.minimum(rho * (returns[e] - mean), rho.clamp(0.8, 1.2) * (returns[e] - mean))
                loss = loss - gain / 7 / len(returns)
    method = dr_grpo().but(reduce=constant(length=7))
    made = made.with_columns(advantage=method.credit(made))
    assert_same(gradient(method, made), slow.gradient(loss))


def test_parts() -> None:
    assert dr_grpo().reduce == constant(length=3000)
    assert dr_grpo().regularise == ()
