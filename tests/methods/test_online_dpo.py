"""Online DPO as published."""

from __future__ import annotations

import pytest
import torch
from kit import Slow, assert_same, gradient, ragged
from papers import groups_of, over_pairs, returns_of, total

from panoply.errors import PanoplyError
from panoply.methods.base.online_dpo import online_dpo
from panoply.planning import make_plan


def test_gradient_is_the_papers() -> None:
    """DPO's loss on the best and the worst of each group (arXiv 2402.04792, algorithm 1)."""
    made, slow, ref = ragged(), Slow(), "logp@reference"
    returns = returns_of(made)
    pairs = []
    for members in groups_of(made):
        best, worst = max(members, key=lambda e: returns[e]), min(members, key=lambda e: returns[e])
        pairs += [(best, worst)] if returns[best] > returns[worst] else []
    assert 0 < len(pairs) < len(groups_of(made))
    loss = over_pairs(
        lambda w, x: -torch.sigmoid(0.1 * (total(made, slow, w, ref) - total(made, slow, x, ref))).log(),
        pairs,
    )
    method = online_dpo()
    (select,) = method.select
    chosen = select(made)
    chosen = chosen.with_columns(advantage=method.credit(chosen))
    found = gradient(method, chosen)
    assert_same(found, slow.gradient(loss))
    assert_same(gradient(method, chosen, micro_tokens=1), found)


def test_equation() -> None:
    assert online_dpo().equation()[0].startswith("maximise  mean over pairs [")


def test_another_loss_may_be_named() -> None:
    method = make_plan("online-dpo", settings={"surrogate.loss": "squared"}).method
    assert "(ℓ_chosen − ℓ_rejected − 5)²" in method.equation()[0]


def test_settings_that_cannot_be() -> None:
    with pytest.raises(PanoplyError, match="not a loss on pairs"):
        make_plan("online-dpo", settings={"surrogate.loss": "nll"})
    with pytest.raises(PanoplyError, match=r"surrogate\.loss\.weight has no effect"):
        make_plan("online-dpo", settings={"surrogate.loss.weight": 2.0})
    with pytest.raises(PanoplyError, match=r"credit\.scale has no effect: .* learns from pairs"):
        make_plan("online-dpo", settings={"credit.scale": "none"})
