"""ORPO as published."""

from __future__ import annotations

import torch
from kit import Slow, assert_same, gradient
from papers import length, over_pairs, paired, total

from panoply.methods.base.orpo import orpo


def test_gradient_is_the_papers() -> None:
    """Equations 3 to 6 of arXiv 2403.07691 with λ = 0.1; log P is the mean over the answer's tokens."""
    made, slow = paired(), Slow()

    def mean(e: int) -> torch.Tensor:
        return total(made, slow, e) / length(made, e)

    def odds(e: int) -> torch.Tensor:
        return mean(e).exp() / (1 - mean(e).exp())

    loss = over_pairs(lambda w, x: -mean(w) - 0.1 * torch.sigmoid((odds(w) / odds(x)).log()).log())
    assert_same(gradient(orpo(), made), slow.gradient(loss))


def test_no_reference() -> None:
    assert "logp@reference" not in orpo().needs()
