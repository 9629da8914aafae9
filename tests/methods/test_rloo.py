"""RLOO as published."""

from __future__ import annotations

import torch
from kit import Slow, assert_same, gradient, ragged, rows_of
from papers import ZERO, groups_of, returns_of, total

from panoply.compose import resolve
from panoply.methods.base.rloo import rloo


def test_gradient_is_the_papers() -> None:
    """Equation 8 of arXiv 2402.14740, with R = r − β·log π/π_ref of the policy that answered."""
    made, slow = ragged(lengths=((2, 1, 3), (1, 4), (2, 2, 2, 1))), Slow()
    made = made.with_columns(**{"signal:success": made["reward"]})
    paid = {
        e: earned - 0.03 * sum(r["logp"] - r["logp@reference"] for r in rows_of(made, episode=e))
        for e, earned in returns_of(made).items()
    }
    loss = ZERO
    for members in groups_of(made):
        for e in members:
            others = [paid[o] for o in members if o != e]
            loss = loss - (paid[e] - sum(others) / len(others)) * total(made, slow, e) / len(paid)
    method = rloo()
    made = made.with_columns(reward=method.reward(made))
    made = made.with_columns(advantage=method.credit(made))
    assert_same(gradient(method, made), slow.gradient(loss))


def test_leaving_one_out_is_unbiased() -> None:
    """The baseline of an episode does not move with what the episode earns."""
    made = ragged(lengths=((1, 1, 1),)).with_columns(reward=torch.tensor([0.0, 2.0, 4.0]))
    assert rloo().credit(made).tolist() == [-3.0, 0.0, 3.0]
    made = made.with_columns(reward=torch.tensor([9.0, 2.0, 4.0]))
    assert rloo().credit(made).tolist()[0] == 6.0


def test_no_reference_without_a_pull() -> None:
    assert "logp@reference" in rloo().needs()
    assert "logp@reference" not in resolve("rloo", preset="tiny").method.needs()
