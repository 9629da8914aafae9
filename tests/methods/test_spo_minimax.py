"""SPO: what an episode earns, and the exact game in which win rates find what scores cannot."""

from __future__ import annotations

import pytest
import torch
from kit import hand

import panoply as pp
from panoply.methods.preferences.spo_minimax import (
    cyclic,
    on_scores,
    self_play,
    spo_minimax,
    wins,
    worst,
    zone,
)
from panoply.regimes import OnPolicy

THIRDS = torch.full((3,), 1 / 3).double()


def test_win_rates_are_spread_over_an_episode() -> None:
    found = hand(episode=[0, 0, 0, 0, 1], **{"signal:wins": [0.0, 0.0, 0.0, 0.75, 0.25]})
    assert wins()(found).tolist() == pytest.approx([0.125] * 4 + [-0.5])


def test_equal_shares_of_raters_make_a_circle() -> None:
    """Two of three prefer each option to the next, and a uniform policy is not beaten."""
    game = cyclic(THIRDS)
    assert torch.allclose(game, torch.tensor([[3, 4, 2], [2, 3, 4], [4, 2, 3]]).double() / 6)
    assert worst(game, THIRDS) == pytest.approx(0.5)
    assert worst(game, torch.tensor([1.0, 0, 0]).double()) == pytest.approx(1 / 3)


def test_the_average_of_self_play_is_the_minimax_winner() -> None:
    """For margins m_ab, m_bc, m_ca of a circle it is p ∝ (m_bc, m_ca, m_ab)."""
    game = cyclic(torch.tensor([0.38, 0.3, 0.32]).double())
    margins = torch.stack([game[1, 2], game[2, 0], game[0, 1]]) - 0.5
    average, last = self_play(game)
    assert torch.allclose(average, margins / margins.sum(), atol=0.01)
    assert worst(game, average) > 0.495
    assert worst(game, last) < worst(game, average) - 0.01  # it goes round, ever further out


def test_scores_go_to_one_option_that_another_beats() -> None:
    game = cyclic(torch.tensor([0.38, 0.3, 0.32]).double())
    policy = on_scores(game)
    assert float(policy.max()) > 0.999
    assert worst(game, policy) == pytest.approx(float(game[policy.argmax()].min()), abs=1e-3)
    transitive = torch.tensor([[0.5, 0.8], [0.2, 0.5]]).double()
    assert float(self_play(transitive)[0][0]) > 0.98
    scores = on_scores(transitive, rounds=1, rate=1.0).log()
    assert float(scores[0] - scores[1]) == pytest.approx(
        1.3862943611, abs=1e-6
    )  # log 4, as Bradley and Terry have it


def test_a_limit_on_time_in_a_zone() -> None:
    """0.807 is where staying longer wins as often as it loses; a fitted reward stays in the zone for good."""
    assert zone(fitted=False) == pytest.approx(0.80703, abs=1e-4)
    assert zone(fitted=True) < 1e-3


def test_no_reward_is_learned_and_none_is_looked_at() -> None:
    made = spo_minimax()
    assert [part.info.name for part in made.models] == ["critic"]
    planned = pp.plan("spo-minimax-answers", "strings").method
    assert isinstance(planned, OnPolicy)
    assert planned.sample.asked == "all"
    assert "signal:wins" in planned.reward.needs()
    assert planned.regularise == ()
