"""SLiC-HF as published."""

from __future__ import annotations

from kit import Slow, assert_same, gradient
from papers import PAIRS, length, over_pairs, paired, total

from panoply.methods.base.slic import slic


def test_gradient_is_the_papers() -> None:
    """Section 2.2 of arXiv 2305.10425: a hinge on log-probabilities, and imitation (a mean over the answer)."""
    made, slow = paired(), Slow()
    loss = over_pairs(
        lambda w, x: (
            (1 - total(made, slow, w) + total(made, slow, x)).relu()
            - 0.5 * total(made, slow, w) / length(made, w)
        )
    )
    leads = [float((total(made, slow, w) - total(made, slow, x)).detach()) for w, x in PAIRS]
    assert min(leads) < 1 < max(leads)
    assert_same(gradient(slic(), made), slow.gradient(loss))


def test_no_reference() -> None:
    assert "logp@reference" not in slic().needs()
