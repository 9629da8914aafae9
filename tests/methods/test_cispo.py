"""CISPO as published."""

from __future__ import annotations

from kit import Slow, assert_same, gradient, ragged, rows_of, values_of
from papers import ZERO, standardised

from panoply.methods.base.cispo import cispo


def test_gradient_is_the_papers() -> None:
    """Equations 4 and 5 of arXiv 2506.13585: sg(min(ρ, 5))·A·log π over all tokens, however far one has moved."""
    made, slow, loss = ragged(drift=2.5), Slow(), ZERO
    advantage, over = standardised(made), 0
    for e in values_of(made, "episode"):
        for row in rows_of(made, episode=e):
            logp = slow.logp(row["state"], row["action"])
            rho = float((logp - row["logp"]).exp().detach())
            over += rho > 5
            loss = loss - min(rho, 5.0) * advantage[e] * logp / len(made)
    assert over > 0
    method = cispo()
    made = made.with_columns(advantage=method.credit(made))
    assert_same(gradient(method, made), slow.gradient(loss))
