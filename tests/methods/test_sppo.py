"""SPPO: win rates and the regression on them, by hand and against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from kit import Tabular, assert_same, hand, learner

from panoply.batch import Batch
from panoply.methods.preferences.sppo import sppo, win_rate, win_rate_regression


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_win_rates_are_against_the_own_group_and_count_oneself_as_a_half() -> None:
    rows = hand(episode=[0, 0, 1, 2], group=[5, 5, 5, 6], **{"signal:true": [0.0, 1.0, 0.5, 9.0]})
    found = win_rate(sharpness=2.0)(rows)
    assert found.tolist() == pytest.approx([0, (0.5 + sigmoid(1)) / 2, (0.5 + sigmoid(-1)) / 2, 0.5])


def test_regression_golden() -> None:
    """ℓ = .3 against 2·(.8 − ½) = .6, and ℓ = −.1 against 2·(.4 − ½) = −.2."""
    columns = {"reward": [0.0, 0.8, 0.4], "logp@old": [-1.0, -1.0, -1.0]}
    now = {"logp": torch.tensor([-0.9, -0.8, -1.1])}
    value, stats = win_rate_regression(eta=2.0)(Batch(hand(episode=[0, 0, 1], **columns), now))
    assert value.tolist() == pytest.approx([-0.09, -0.01], abs=1e-6)
    assert stats["chosen_logratio"].tolist() == pytest.approx([0.3])
    assert stats["rejected_logratio"].tolist() == pytest.approx([-0.1])


def test_the_gradient_is_the_equations() -> None:
    policy = Tabular()
    state, action, episode = [0, 1, 2, 3, 4], [0, 1, 2, 3, 0], [0, 0, 1, 1, 2]
    old = [-1.0, -1.2, -0.7, -2.0, -1.5]
    reward = [0.0, 0.9, 0.0, 0.2, 0.6]
    rows = hand(state=state, action=action, episode=episode, reward=reward, **{"logp@old": old})
    method = sppo().but(surrogate=win_rate_regression(eta=3.0))
    probabilities = policy.logits.detach().softmax(-1)
    slow = torch.zeros_like(policy.logits)
    for e in range(3):
        mine = [i for i in range(5) if episode[i] == e]
        ratio = sum(float(probabilities[state[i], action[i]].log()) - old[i] for i in mine)
        target = 3.0 * (sum(reward[i] for i in mine) - 0.5)
        for i in mine:
            score = -probabilities[state[i]].clone()
            score[action[i]] += 1
            slow[state[i]] += 2 * (ratio - target) * score / 3
    for micro in (1, 2, 100):
        found = learner(policy, method, micro_tokens=micro).gradient(rows)
        assert_same(found["logits"], slow)


def test_in_a_game_without_a_best_move_the_average_comes_to_rest() -> None:
    """Rock, paper, scissors with exact win rates: how much the best answer wins against the policies of all rounds.

    Each round's regression is solved by gradients of the method's own. The average is exploited less and less, and the
    last policy more and more, as multiplicative weights are.
    """
    wins = torch.tensor([[0.5, 0.0, 1.0], [1.0, 0.5, 0.0], [0.0, 1.0, 0.5]], dtype=torch.float64)
    policy = Tabular(states=1, actions=3)
    with torch.no_grad():
        policy.logits.copy_(torch.tensor([[0.5, 0.0, -0.2]]))
    game = learner(policy, sppo().but(surrogate=win_rate_regression(eta=0.5)))
    played, exploited = [], []
    for _ in range(40):
        old = policy.logits.detach().log_softmax(-1)[0]
        rewards = (wins @ old.exp()).tolist()
        rows = hand(state=[0, 0, 0], action=[0, 1, 2], reward=rewards, **{"logp@old": old})
        for _ in range(6):
            slope = game.gradient(rows)["logits"]
            with torch.no_grad():
                policy.logits -= slope
        played.append(old.exp())
        exploited.append(
            [float((wins @ mixed).max()) - 0.5 for mixed in (torch.stack(played).mean(0), old.exp())]
        )
    (average, _), (first, _) = exploited[-1], exploited[0]
    assert average < first / 3
    assert max(last for _, last in exploited[20:]) > first
