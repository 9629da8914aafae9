"""SimPO as published."""

from __future__ import annotations

import torch
from kit import Slow, assert_same, gradient
from papers import length, over_pairs, paired, total

from panoply.methods.base.simpo import simpo


def test_gradient_is_the_papers() -> None:
    """Equation 6 of arXiv 2405.14734 with β = 2 and γ = 1."""
    made, slow = paired(), Slow()

    def score(e: int) -> torch.Tensor:
        return 2.0 / length(made, e) * total(made, slow, e)

    loss = over_pairs(lambda w, x: -torch.sigmoid(score(w) - score(x) - 1.0).log())
    assert_same(gradient(simpo(), made), slow.gradient(loss))


def test_no_reference() -> None:
    assert "logp@reference" not in simpo().needs()
