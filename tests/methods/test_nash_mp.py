"""Nash-MP and Nash Prox: two prox steps from one anchor, what each of them ascends, and the exact game."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kit import Tabular, assert_same, hand, learner

from panoply.errors import PanoplyError
from panoply.evaluation import preference_games as games
from panoply.experience import Experience
from panoply.loops.learner import Learner
from panoply.methods.preferences.nash_mp import from_the_anchor, nash_mp, nash_prox, own_answers, to_nash
from panoply.planning import make_plan

REFERENCE, ANCHOR = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]


def answers(wins: list[float], actor: int = 0) -> Experience:
    """One state, a uniform policy's three answers, a decision each, and how often each of them won."""
    columns = {
        "signal:wins": wins,
        "logp": np.log([1 / 3] * 3).tolist(),
        "logp@reference": np.log(REFERENCE).tolist(),
        "logp@behind:20": np.log(ANCHOR).tolist(),
    }
    return hand(state=[0, 0, 0], action=[0, 1, 2], group=[7, 7, 7], actor=[actor] * 3, **columns)


def test_a_prox_step_ascends_its_objective() -> None:
    """∇ of P(π ≻ opponent) − β·KL(π‖π_ref) − (β/η)·KL(π‖π_k), three halves of it with leave-one-out of three."""
    game, opponent = games.cyclic(3, 0.9), np.array([0.6, 0.3, 0.1])
    method = nash_mp()
    rows = answers((game @ opponent).tolist())
    rows = rows.with_columns(reward=method.reward(rows))
    assert rows["reward"][0] == pytest.approx(
        game[0] @ opponent - 0.05 * np.log((1 / 3) / 0.5) - 0.5 * np.log((1 / 3) / 0.2)
    )
    rows = rows.with_columns(advantage=method.credit(rows))
    policy = Tabular(states=1, actions=3)
    with torch.no_grad():
        policy.logits.zero_()
    found = learner(policy, method).gradient(rows)["logits"][0]
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    won = logp.exp() @ torch.tensor(game @ opponent)
    to_reference, to_anchor = (
        (logp.exp() * (logp - torch.tensor(q).log())).sum() for q in (REFERENCE, ANCHOR)
    )
    (won - 0.05 * to_reference - 0.5 * to_anchor).backward()
    assert logits.grad is not None
    assert_same(found, -1.5 * logits.grad)


def walk(steps: range, made: Learner, weights: Tabular) -> list[list[float]]:
    """Weights before each step, along a gradient that is another one in every step."""
    seen = []
    for step in steps:
        wins = [0.9 if step % 4 < 2 else 0.1, 0.4, 0.7]
        rows = made.sampled(step, lambda wins=wins: answers(wins))  # type: ignore[misc]
        seen.append(weights.logits.detach().flatten().tolist())
        advantage = torch.tensor(wins, dtype=torch.float64) - 0.5
        made.step(rows.with_columns(advantage=advantage), step)
    return seen


def moving() -> tuple[Learner, Tabular]:
    policy = Tabular(states=1, actions=3)
    return learner(policy, nash_mp().but(update=from_the_anchor(every=3, lr=0.1))), policy


def test_the_second_prox_step_begins_at_the_anchor() -> None:
    """Steps 0–2 lead to the half-way policy; step 3 begins where step 0 did, and step 6 where step 5 ended."""
    seen = walk(range(13), *moving())
    assert seen[3] == seen[0]
    assert seen[4] != seen[1]  # another opponent, another gradient
    assert seen[9] == seen[6] != seen[0]
    assert len({tuple(weights) for weights in seen}) == 11
    policy = Tabular(states=1, actions=3)
    plain = learner(policy, nash_mp().but(update=nash_prox().update.but(lr=0.1)))
    again = walk(range(3, 6), plain, policy)  # fresh averages, as they were at the anchor
    assert seen[3:6] == [pytest.approx(weights) for weights in again]


def test_what_it_remembers_is_saved() -> None:
    whole = walk(range(10), *moving())
    for at in (1, 2, 4, 5, 7):
        first, policy = moving()
        before = walk(range(at), first, policy)
        state = {name: value.clone() for name, value in first.state().items()}
        second, other = moving()
        with torch.no_grad():
            other.logits.copy_(policy.logits)
        second.load_state(state)
        assert before + walk(range(at, 10), second, other) == whole


def test_opponents_teach_nothing() -> None:
    assert own_answers()(answers([0.1, 0.2, 0.3], actor=1)).tolist() == [False] * 3
    assert own_answers()(answers([0.1, 0.2, 0.3])).tolist() == [True] * 3


def test_the_three_numbers_go_together() -> None:
    def plan(name: str = "nash-mp", **settings: Any) -> None:
        make_plan(name, "strings", settings={path.replace("_", "."): v for path, v in settings.items()})

    with pytest.raises(PanoplyError, match="sample.against=behind:5 and reward.to=behind:10"):
        plan(update_every=5)
    plan(update_every=5, sample_against="behind:5", reward_to="behind:10")
    with pytest.raises(PanoplyError, match="all answers are the learner's own"):
        plan(sample_against="learner", update="adam")
    assert nash_prox().needs() >= {"logp@ema:0.05", "logp@reference"}
    assert nash_prox().acts_alone


def test_what_the_claim_measures() -> None:
    """Below 1e-5 after 50 iterations of two queries, where nobody else is near after as many queries."""
    found = to_nash(1001)
    assert found["KL to Nash after 50 iterations"] == pytest.approx(2.328e-6, rel=1e-3)
    assert found["no extrapolation"] == pytest.approx(0.07844, rel=1e-3)
    assert found["queries"] == 100
    assert (
        found["Nash-MD, step 1"]
        >= found["Nash-MD at its best"]
        > 10 * found["KL to Nash after 50 iterations"]
    )
    assert found["no extrapolation, 400"] > 1e-2
    assert found["powers of ten"] == pytest.approx(
        np.log10(found["Nash-MD at its best"] / found["KL to Nash after 50 iterations"])
    )
