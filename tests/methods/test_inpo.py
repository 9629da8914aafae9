"""INPO: the regression on two anchors, its minimum, and its limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kit import Slow, Tabular, assert_same, batch, gradient, hand, learner
from papers import over_pairs, paired, total

from panoply.errors import PanoplyError
from panoply.evaluation import preference_games as games
from panoply.experience import Experience, Table
from panoply.methods.preferences.inpo import inpo, last_policies, two_anchors
from panoply.methods.preferences.ipo_md import online_ipo
from panoply.planning import make_plan
from panoply.slots.surrogate.preferences import preference


def method(**settings: Any) -> Any:
    return inpo().but(surrogate=preference(loss=two_anchors(**settings)))


def rows() -> Experience:
    made = paired()
    return made.with_columns(**{"logp@old": made["logp@reference"] * 0.7 - 0.1})


def test_loss_golden() -> None:
    """τ/η = ¼: h is .3 + ¼·1 + ¾·.4 of sums over tokens, and the aim 1/(2·2)."""
    made = hand(
        [(0, 1)], episode=[0, 0, 1], **{"logp@reference": [-1.0, -1.0, -1.0], "logp@old": [-0.5, -0.6, -0.2]}
    )
    seen = batch(made, logp=[-0.4, -0.3, -1.1])
    value, stats = two_anchors(eta=2.0, tau=0.5)(seen)
    first = 0.25 * (-0.7 + 2.0) + 0.75 * (-0.7 + 1.1)
    second = 0.25 * (-1.1 + 1.0) + 0.75 * (-1.1 + 0.2)
    assert value.tolist() == pytest.approx([(first - second - 0.25) ** 2])
    assert stats["margin"].tolist() == pytest.approx([first - second])


def test_gradient_is_the_papers() -> None:
    made, slow = rows(), Slow()

    def h(episode: int) -> torch.Tensor:
        return 0.25 * total(made, slow, episode, "logp@reference") + 0.75 * total(
            made, slow, episode, "logp@old"
        )

    expected = slow.gradient(over_pairs(lambda w, x: (h(w) - h(x) - 1 / 0.8) ** 2))
    for micro in (3, 10**9):
        assert_same(gradient(method(eta=0.4, tau=0.1), made, micro_tokens=micro), expected)


def test_with_the_whole_anchor_at_the_reference_it_is_online_ipo() -> None:
    assert_same(gradient(method(eta=0.1, tau=0.1), paired()), gradient(online_ipo(), paired()))
    assert method(eta=0.1, tau=0.1).needs() >= {"logp@reference"}
    assert "logp@reference" not in method(eta=0.1, tau=0.0).needs()


def test_its_minimum_is_the_mirror_step() -> None:
    """All pairs of a uniform π_t with known preferences: where the learner's gradient is 0, and that is one place."""
    wins, reference, uniform = games.cyclic(3, 0.9), np.array([0.5, 0.3, 0.2]), np.full(3, 1 / 3)
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    columns = {"logp@reference": np.log(reference).tolist(), "logp@old": np.log(uniform).tolist()}
    made = hand(pairs, state=[0, 0, 0], action=[0, 1, 2], **columns)
    assert made.pairs is not None
    made = made.with_pairs(Table({**made.pairs, "p": torch.tensor([wins[a, b] for a, b in pairs])}))
    policy = Tabular(states=1, actions=3)
    step = games.inpo(wins, reference, uniform, tau=0.1, eta=0.4)
    with torch.no_grad():
        policy.logits.copy_(torch.tensor(np.log(step)))
    slope = learner(policy, method(eta=0.4, tau=0.1)).gradient(made)["logits"]
    assert float(slope.abs().max()) < 1e-6
    with torch.no_grad():
        policy.logits[0, 0] += 0.1
    assert float(learner(policy, method(eta=0.4, tau=0.1)).gradient(made)["logits"].abs().max()) > 1e-2


def test_bad_settings_are_refused() -> None:
    for settings, says in (
        ({"surrogate.loss.tau": 0.5}, "share τ/η would be above 1"),
        ({"surrogate.loss.start": "reference"}, "the other anchor already"),
        ({"surrogate.loss.eta": 0}, "above 0"),
    ):
        with pytest.raises(PanoplyError, match=says):
            make_plan("inpo", "strings", settings=settings)


def test_what_the_claim_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("panoply.methods.preferences.inpo.ROUNDS", 60)
    found = last_policies(1001)
    assert found["ahead"] == found["exploited, iterative DPO"] - found["exploited, INPO"] > 0
    assert found["KL to Nash"] < 0.1
