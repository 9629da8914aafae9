"""POAD: γ between actions alone, by hand, against the released code's loop, and against values of whole actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kit import Tabular, hand, ragged

import panoply as pp
from panoply.effects import inert
from panoply.errors import PanoplyError
from panoply.experience import TERMINATED, TRUNCATED, Experience
from panoply.loops.learner import Learner
from panoply.methods.agents import poad as work
from panoply.methods.agents.poad import CLAIM, best_words, differences, played, token_values
from panoply.slots.credit.gae import gae
from panoply.worlds.control.mdp import MDP

PLAIN: dict[str, Any] = {"normalise": False}


def words(seed: int, last: int = TERMINATED) -> Experience:
    """Four episodes of one to four turns, of one to six tokens each; a turn's last token is paid."""
    dice = np.random.default_rng(seed)
    rows: dict[str, list[Any]] = {
        n: [] for n in ("episode", "turn", "position", "reward", "value", "next_value", "end")
    }
    for episode in range(4):
        turns = int(dice.integers(1, 5))
        for turn in range(turns):
            length = int(dice.integers(1, 7))
            for at in range(length):
                ends = at == length - 1
                over = last if ends and turn == turns - 1 else 0
                row = (episode, turn, at, float(dice.normal() * ends), dice.normal(), dice.normal(), over)
                for name, x in zip(rows, row, strict=True):
                    rows[name].append(float(x) if name in ("reward", "value", "next_value") else x)
    return hand(**rows)


# ------------------------------------------------------------------ credit


def test_numbers_by_hand() -> None:
    """Turns of two tokens and of one, γ .9, λ .5: only the step from the second row to the third is discounted."""
    made = hand(
        episode=[7] * 3, turn=[0, 0, 1], position=[0, 1, 0], end=[0, 0, TRUNCATED],
        reward=[0.0, 0.5, 1.0], value=[0.5, 0.4, 0.6], next_value=[9.0, 9.0, 2.0],
    )  # fmt: skip
    δ = [0.4 - 0.5, 0.5 + 0.9 * 0.6 - 0.4, 1.0 + 0.9 * 2.0 - 0.6]
    A = [δ[0] + 0.5 * (δ[1] + 0.45 * δ[2]), δ[1] + 0.45 * δ[2], δ[2]]
    assert pytest.approx([0.715, 1.63, 2.2]) == A
    for order in ([0, 1, 2], [2, 0, 1]):
        found = gae(gamma=0.9, lam=0.5, inside=1.0, **PLAIN)(made.take(torch.tensor(order)))
        assert found["advantage"].tolist() == pytest.approx([A[i] for i in order])
        assert found["target"].tolist() == pytest.approx([A[i] + [0.5, 0.4, 0.6][i] for i in order])


@pytest.mark.parametrize("inside", [1.0, None], ids=["POAD", "NTPO"])
@pytest.mark.parametrize("last", [TERMINATED, TRUNCATED])
def test_parity_with_the_released_loop(inside: float | None, last: int) -> None:
    """Backwards over turns and tokens with one running sum, as batch_process_tppo of the authors' buffer computes."""
    gamma, lam, made = 0.9, 0.8, words(3, last)
    value, reward, after = (made[n].tolist() for n in ("value", "reward", "next_value"))
    episode, turn = made["episode"].tolist(), made["turn"].tolist()
    want, running = [0.0] * len(made), 0.0
    for i in reversed(range(len(made))):
        final = i + 1 == len(made) or episode[i + 1] != episode[i]
        if final:
            follows = after[i] if last == TRUNCATED else 0.0
            running = reward[i] + gamma * follows - value[i]
        else:
            d = gamma if inside is None or turn[i + 1] != turn[i] else 1.0
            running = reward[i] + d * value[i + 1] - value[i] + d * lam * running
        want[i] = running
    found = gae(gamma=gamma, lam=lam, inside=inside, **PLAIN)(made)
    assert found["advantage"].tolist() == pytest.approx(want, abs=1e-6)


def test_without_lambda_a_first_token_expects_what_its_action_does() -> None:
    """λ = 1: targets of first tokens are those of whole actions; λ < 1 counts tokens, and they differ."""
    made = words(5)
    first = made["position"] == 0
    by_turn, by_token = (
        {"by": "turn", "gamma": 0.9, **PLAIN},
        {"inside": 1.0, "gamma": 0.9, **PLAIN},
    )
    same = [gae(lam=1.0, **s)(made)["target"][first] for s in (by_turn, by_token)]
    assert same[0].tolist() == pytest.approx(same[1].tolist())
    other = [gae(lam=0.5, **s)(made)["target"][first] for s in (by_turn, by_token)]
    assert (other[0] - other[1]).abs().max() > 0.01


def test_nothing_differs_without_discount_or_with_actions_of_one_token() -> None:
    made = words(6)
    for name, found in gae(gamma=1.0, inside=1.0)(made).items():
        assert torch.equal(found, gae(gamma=1.0)(made)[name])
    ones = made.take(torch.nonzero(made["position"] == 0)[:, 0])
    for name, found in gae(gamma=0.5, inside=1.0)(ones).items():
        assert torch.equal(found, gae(gamma=0.5)(ones)[name])


def test_a_turn_border_between_episodes_is_no_inside() -> None:
    """Two episodes whose turns have the same number do not run together."""
    made = hand(
        episode=[0, 1], turn=[0, 0], position=[0, 0], end=[TRUNCATED] * 2, reward=[0.0, 0.0],
        value=[0.0, 0.0], next_value=[1.0, 1.0],
    )  # fmt: skip
    assert gae(gamma=0.5, inside=1.0, **PLAIN)(made)["target"].tolist() == [0.5, 0.5]


# ------------------------------------------------------------------ values


def three_states() -> MDP:
    flow, pays = np.zeros((4, 2, 4)), np.zeros((4, 2, 4))
    for state, short in enumerate(work.SHORT):
        flow[state, :, state + 1] = 1
        pays[state, :, state + 1] = (short, work.PAYS)
    flow[3, :, 3] = 1
    return MDP(flow, pays, np.eye(4)[0], np.array([False] * 3 + [True]))


def test_the_three_states_by_hand() -> None:
    """1 + .9·(1 + .9·1) = 2.71; discounted at every letter the long word is worth .9⁵ = .59049, above .5 alone."""
    assert best_words(0.9, 1.0) == (pytest.approx([2.71, 1.9, 1.0]), [True] * 3)
    assert best_words(0.9, 0.9) == (pytest.approx([2.0082969, 1.231441, 0.59049]), [False, False, True])
    for inside in (1.0, 0.9):
        found = token_values(three_states(), ["a", "bcdefg"], 0.9, inside)
        assert found[""][:3].tolist() == pytest.approx(best_words(0.9, inside)[0], abs=1e-12)
    assert found["bcdef"][2] == 1.0
    assert found["b"][2] == pytest.approx(0.9**4)


def test_values_of_letters_are_those_of_actions() -> None:
    found = list(differences(1001, states=3, words=4).values())
    assert found[0] < 1e-8 < 0.1 < found[1]
    with pytest.raises(PanoplyError, match="gamma from 0 to 0.99"):
        work.poad_values(gamma=1.0)


def test_episodes_of_words() -> None:
    """Always the long word: 18 letters, each sixth pays 1. Never: three, which pay what short words do."""
    dice = torch.Generator().manual_seed(0)
    long = played(torch.ones(3, dtype=torch.float64), 2, dice)
    assert len(long) == 36
    assert long["reward"].nonzero()[:, 0].tolist() == [5, 11, 17, 23, 29, 35]
    assert long["end"].nonzero()[:, 0].tolist() == [17, 35]
    short = played(torch.zeros(3, dtype=torch.float64), 2, dice)
    assert short["reward"].tolist() == pytest.approx([*work.SHORT, *work.SHORT])


def test_the_claim_measures_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "STEPS", 8)
    assert CLAIM.measure is work.long_words
    found = work.long_words(1001)
    assert found["ahead"] == found["POAD"] - found["γ at every token"] > 0.2
    assert found["whole actions"] > 0.6
    chance, _ = work.practised(1001, None, "decision")
    assert chance[0] < 0.5 < chance[2], (
        "discounted at every letter, the long word is the better one in the last alone"
    )


# ------------------------------------------------------------------ the method


@pytest.mark.parametrize(("limit", "skipped"), [(0.2, 1.0), (0.3, 0.0), (0.0, 0.0)])
def test_a_policy_too_far_away_does_not_move(limit: float, skipped: float) -> None:
    """ρ is e^.7 on one token and e^−.7 on the other: ρ − 1 − log ρ is .3138 and .1966, a mean of .2552."""
    made, policy = ragged(lengths=((1, 1),), drift=0.0), Tabular()
    made = made.with_columns(logp=made["logp"] - torch.tensor([0.7, -0.7]).double())
    method = work.poad().but(update=work.poad().update.but(skip_kl=limit), regularise=())
    learner = Learner(policy, method, total_steps=2, micro_tokens=100)
    before = policy.logits.detach().clone()
    told = learner.step(made.with_columns(advantage=torch.tensor([1.0, 1.0]).double()), 0)
    assert told["kl_behaviour"] == pytest.approx(0.2552, abs=1e-4)
    assert told.get("skipped", 0.0) == skipped
    assert torch.equal(before, policy.logits.detach()) == bool(skipped)


@pytest.mark.parametrize(
    ("world", "settings", "name"),
    [
        ("chain", {}, "credit.gamma"),
        ("keydoor", {}, "credit.inside"),
        ("tools", {"credit.by": "turn"}, "credit.inside"),
        ("tools", {"update.epochs": 1, "update.minibatches": 1}, "update.skip_kl"),
    ],
)
def test_settings_without_effect(world: str, settings: dict[str, Any], name: str) -> None:
    assert name in dict(inert(pp.plan("poad", world, settings=settings)))


def test_refusals() -> None:
    with pytest.raises(PanoplyError, match="credit.inside has no effect: a turn of cartpole is one decision"):
        pp.plan("ppo", "cartpole", settings={"credit.inside": 0.5})
    with pytest.raises(PanoplyError, match="credit.inside must be from 0 to 1"):
        pp.plan("poad", settings={"credit.inside": 1.5})
    assert "inside a turn γ = 1" in " ".join(pp.plan("poad").method.equation())
