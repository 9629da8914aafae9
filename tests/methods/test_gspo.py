"""GSPO as published."""

from __future__ import annotations

import torch
from kit import Slow, assert_same, gradient, ragged, values_of
from papers import ZERO, length, standardised, total

from panoply.compose import assign
from panoply.methods.base.gspo import gspo


def test_gradient_is_the_papers() -> None:
    """Equations 5 to 7 of arXiv 2507.18071, with bounds wide enough to have both kinds of episode."""
    made, slow, loss = ragged(drift=0.4), Slow(), ZERO
    advantage = standardised(made)
    inside = 0
    for e in values_of(made, "episode"):
        s = (total(made, slow, e, against="logp") / length(made, e)).exp()
        inside += bool(0.9 < s < 1.15)
        loss = loss - torch.minimum(s * advantage[e], s.clamp(0.9, 1.15) * advantage[e]) / len(advantage)
    assert 0 < inside < len(advantage)
    method = assign(assign(gspo(), "surrogate.low", 0.1), "surrogate.high", 0.15)
    made = made.with_columns(advantage=gspo().credit(made))
    assert_same(gradient(method, made), slow.gradient(loss))  # type: ignore[arg-type]


def test_published_bounds() -> None:
    assert "clip(s, 0.9997, 1.0004)" in gspo().equation()[0]
    assert gspo().equation()[0].startswith("maximise  mean over episodes [")
