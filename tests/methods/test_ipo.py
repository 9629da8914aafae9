"""IPO as published."""

from __future__ import annotations

from kit import Slow, assert_same, gradient
from papers import over_pairs, paired, total

from panoply.methods.base.ipo import ipo


def test_gradient_is_the_papers() -> None:
    """Equation 17 of arXiv 2310.12036 with τ = 0.1."""
    made, slow = paired(), Slow()
    ref = "logp@reference"
    loss = over_pairs(lambda w, x: (total(made, slow, w, ref) - total(made, slow, x, ref) - 1 / 0.2) ** 2)
    assert_same(gradient(ipo(), made), slow.gradient(loss))
