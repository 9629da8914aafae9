"""Exact games of preference: closed forms, gradients against autograd, and what converges to what."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from panoply import functions
from panoply.errors import PanoplyError
from panoply.evaluation import preference_games as games

WINS = games.checked(
    [[0.5, 0.05, 0.95, 0.7], [0.95, 0.5, 0.1, 0.6], [0.05, 0.9, 0.5, 0.6], [0.3, 0.4, 0.4, 0.5]]
)
"""b beats a, c beats b, a beats c, and a fourth answer loses to all."""
REFERENCE = np.array([0.4, 0.3, 0.2, 0.1])
TAU = 0.05


@pytest.fixture(scope="module")
def nash() -> games.Array:
    return games.regularised_nash(WINS, REFERENCE, TAU)


def test_nobody_gains_on_the_nash_policy(nash: games.Array) -> None:
    best = REFERENCE * np.exp(WINS @ nash / TAU)
    assert nash == pytest.approx(best / best.sum(), abs=1e-13)
    for other in (REFERENCE, games.uniform(WINS), np.array([0.97, 0.01, 0.01, 0.01])):
        gained = games.win_rate(WINS, other, nash) - TAU * games.kl(other, REFERENCE)
        assert gained < 0.5 - TAU * games.kl(nash, REFERENCE)


def test_a_weakly_regularised_circle_is_solved_too() -> None:
    circle, reference = games.cyclic(3), np.array([0.6, 0.3, 0.1])
    nash = games.regularised_nash(circle, reference, 0.03)
    best = reference * np.exp(circle @ nash / 0.03)
    assert nash == pytest.approx(best / best.sum(), abs=1e-13)


def test_nash_md_plays_against_its_mixture_with_the_reference() -> None:
    policy, tau, eta = np.array([0.1, 0.2, 0.3, 0.4]), 0.1, 2.0
    mixed = policy**0.8 * REFERENCE**0.2
    mixed /= mixed.sum()
    step = mixed * np.exp(eta * (WINS @ mixed))
    assert games.nash_md(WINS, REFERENCE, policy, tau=tau, eta=eta) == pytest.approx(step / step.sum())


def test_of_two_answers_the_nash_policy_is_known() -> None:
    """The two win rates differ by p − ½ whoever is met, so the odds are those of the reference times exp((p − ½)/τ)."""
    nash = games.regularised_nash(np.array([[0.5, 0.8], [0.2, 0.5]]), np.array([0.4, 0.6]), 0.1)
    assert nash[0] / nash[1] == pytest.approx(0.4 / 0.6 * math.exp(3), rel=1e-12)


def test_measures() -> None:
    circle = games.cyclic(3)
    assert circle[1, 0] == circle[2, 1] == circle[0, 2] == 1
    assert games.exploitability(circle, games.uniform(circle)) == 0
    assert games.exploitability(circle, np.array([1.0, 0, 0])) == 0.5
    assert games.win_rate(circle, np.array([0.0, 1, 0]), np.array([0.5, 0, 0.5])) == 0.5
    assert games.kl(np.array([0.5, 0.5]), np.array([0.25, 0.75])) == pytest.approx(0.5 * math.log(4 / 3))
    assert games.mixture(np.array([0.8, 0.2]), np.array([0.2, 0.8]), 0.5) == pytest.approx([0.5, 0.5])


def test_steps_golden() -> None:
    """Two answers, P = .8, π = (½, ½), π_ref = (.4, .6): wins are .65 and .35, and log-odds move by multiples of .3."""
    wins, half, reference = np.array([[0.5, 0.8], [0.2, 0.5]]), np.array([0.5, 0.5]), np.array([0.4, 0.6])

    def odds(policy: games.Array) -> float:
        return math.log(policy[0] / policy[1])

    pull = math.log(0.4 / 0.6)
    assert odds(games.multiplicative_weights(wins, half, eta=2)) == pytest.approx(0.6)
    assert odds(games.offline_ipo(wins, reference, half, tau=0.1)) == pytest.approx(pull + 3)
    assert odds(games.inpo(wins, reference, half, tau=0.1, eta=0.4)) == pytest.approx(0.25 * pull + 0.3 / 0.4)
    assert odds(games.nash_md(wins, reference, half, tau=0.1, eta=2)) == pytest.approx(0.2 * pull + 0.6)
    assert odds(games.proximal(wins, reference, half, tau=0.1)) == pytest.approx((pull + 3) / 6)
    assert odds(games.iterative_dpo(wins, half, beta=2)) == pytest.approx(math.log(4) / 2)
    score = -pull - 3  # the slope of the logits is 2·½·(s − mean s), ± half of the difference
    assert odds(games.online_ipo(wins, reference, half, tau=0.1, rate=0.05)) == pytest.approx(-0.05 * score)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_online_ipo_descends_its_loss(share: float) -> None:
    """No gradient flows through the answers' chances, nor through preferences."""
    policy = np.array([0.1, 0.2, 0.3, 0.4])
    logits = torch.tensor(np.log(policy), requires_grad=True)
    sampled = torch.tensor(games.mixture(policy, REFERENCE, share))
    score = logits.log_softmax(0) - torch.tensor(REFERENCE).log()
    loss = 0.0 * logits.sum()
    for a in range(4):
        for b in range(4):
            aim = (WINS[a, b] - 0.5) / TAU
            loss = loss + 0.5 * sampled[a] * sampled[b] * (score[a] - score[b] - aim) ** 2
    loss.backward()
    after = games.online_ipo(WINS, REFERENCE, policy, tau=TAU, rate=0.01, share=share)
    assert after == pytest.approx((logits - 0.01 * logits.grad).softmax(0).detach().numpy(), rel=1e-12)


def test_inpos_tabular_minimiser_is_the_mirror_step() -> None:
    """Labels are all ±1/2η; the least squares of h over pairs of π_t, found by solving for the logits."""
    policy, tau, eta = np.array([0.1, 0.2, 0.3, 0.4]), 0.1, 0.4
    rows, aims, weights = [], [], []
    known = (tau / eta) * np.log(REFERENCE) + (1 - tau / eta) * np.log(policy)
    for a in range(4):
        for b in range(4):
            for first, chance in ((a, WINS[a, b]), (b, WINS[b, a])):
                winner, loser = (a, b) if first == a else (b, a)
                row = np.zeros(4)
                row[winner] += 1
                row[loser] -= 1
                rows.append(row)
                aims.append(known[winner] - known[loser] + 1 / (2 * eta))
                weights.append(math.sqrt(policy[a] * policy[b] * chance))
    scale = np.array(weights)
    logits = np.linalg.lstsq(np.array(rows) * scale[:, None], np.array(aims) * scale, rcond=None)[0]
    step = games.inpo(WINS, REFERENCE, policy, tau=tau, eta=eta)
    assert step == pytest.approx(np.exp(logits) / np.exp(logits).sum(), rel=1e-9)


def test_a_prox_step_is_the_best_that_can_be_done() -> None:
    policy, eta = np.array([0.1, 0.2, 0.3, 0.4]), 0.3

    def worth(q: games.Array, opponent: games.Array) -> float:
        lost = games.win_rate(WINS, opponent, q) / TAU
        return lost + games.kl(q, REFERENCE) + games.kl(q, policy) / eta

    half, whole = (games.proximal(WINS, REFERENCE, policy, tau=TAU, eta=eta, plays=n) for n in (1, 2))
    for found, opponent in (
        (half, policy),
        (whole, half),
    ):  # both from the same anchor: KL is to `policy` in both
        for other in np.random.default_rng(0).dirichlet(np.ones(4), 50):
            near = 0.999 * found + 0.001 * other
            assert worth(found, opponent) <= worth(near, opponent)
    again = games.proximal(WINS, REFERENCE, half, tau=TAU, eta=eta, plays=1)
    assert np.abs(again - whole).max() > 0.01  # a second step from the half-way policy is another one


def test_one_play_is_inpos_step_and_many_are_the_proximal_point() -> None:
    policy, eta = np.array([0.1, 0.2, 0.3, 0.4]), 0.1
    once = games.proximal(WINS, REFERENCE, policy, tau=TAU, eta=eta, plays=1)
    assert once == pytest.approx(
        games.inpo(WINS, REFERENCE, policy, tau=TAU, eta=TAU * (1 + 1 / eta)), rel=1e-12
    )
    point = games.proximal(WINS, REFERENCE, policy, tau=TAU, eta=eta, plays=200)
    anchor, pull = games.mixture(policy, REFERENCE, eta / (1 + eta)), TAU * (1 + 1 / eta)
    assert point == pytest.approx(games.regularised_nash(WINS, anchor, pull), abs=1e-12)


def test_in_a_circle_extrapolation_is_what_converges(nash: games.Array) -> None:
    """Nash-MP after 50 iterations, 100 queries; the same step without extrapolation circles after 400."""

    def far(update: games.Update, steps: int) -> float:
        return games.kl(nash, games.course(update, REFERENCE, steps).last)

    mirror = games.course(lambda p: games.proximal(WINS, REFERENCE, p, tau=TAU), REFERENCE, 100, queries=2)
    assert mirror.after(100) == pytest.approx(mirror.policies[50])
    found = [games.kl(nash, mirror.policies[n]) for n in (50, 100)]
    assert found[0] < 1e-5
    assert found[1] < 1e-9
    assert (found[1] / found[0]) ** (1 / 50) < 1 / (1 + 2 * TAU)  # the published rate, an iteration
    assert far(lambda p: games.proximal(WINS, REFERENCE, p, tau=TAU, plays=1), 400) > 1e-2
    assert far(lambda p: games.nash_md(WINS, REFERENCE, p, tau=TAU, eta=1), 100) > 100 * found[0]


def test_the_reference_is_what_lets_inpos_last_policy_rest() -> None:
    """With τ = .1 and η = ½ it does; multiplicative weights have no reference: all but their mean circles outwards."""
    nash = games.regularised_nash(WINS, REFERENCE, 0.1)
    rests = games.course(lambda p: games.inpo(WINS, REFERENCE, p, tau=0.1, eta=0.5), REFERENCE, 400)
    assert games.kl(nash, rests.last) < 1e-12
    circles = games.course(lambda p: games.multiplicative_weights(WINS, p, eta=0.5), REFERENCE, 1000)
    first, last, mean = (games.exploitability(WINS, p) for p in (REFERENCE, circles.last, circles.average))
    assert last > 2 * first
    assert mean < first / 8
    scores = games.course(lambda p: games.iterative_dpo(WINS, p, beta=2), REFERENCE, 150)
    assert games.exploitability(WINS, scores.last) > 2 * first


def test_online_ipo_finds_the_nash_policy_and_mixtures_another() -> None:
    nash = games.regularised_nash(WINS, REFERENCE, 0.1)

    def at_rest(share: float) -> games.Array:
        step = lambda p: games.online_ipo(WINS, REFERENCE, p, tau=0.1, rate=0.3, share=share)  # noqa: E731
        return games.course(step, REFERENCE, 2500).last

    assert games.kl(nash, at_rest(0.0)) < 1e-15
    exploited = [games.exploitability(WINS, at_rest(share)) for share in (0.0, 0.125, 0.5)]
    assert exploited[0] + 0.003 < exploited[1] < exploited[2] - 0.01
    for data in (REFERENCE, games.uniform(WINS)):
        offline = games.offline_ipo(WINS, REFERENCE, data, tau=0.1)
        assert games.kl(nash, offline) > 0.01
        assert games.exploitability(WINS, offline) > exploited[0] + 0.01


def test_games_are_drawn_by_name() -> None:
    for made in (games.random_game, games.random_circle):
        assert np.array_equal(made(3), made(3))
        assert not np.array_equal(made(3), made(4))
    circle = games.random_circle(5)
    assert min(circle[1, 0], circle[2, 1], circle[0, 2]) >= 0.9
    assert circle[3, :3].max() <= 0.5


@pytest.mark.parametrize(
    ("wins", "says"),
    [
        ([[0.5, 1.2], [-0.2, 0.5]], "from 0 to 1, not 1.2"),
        ([[0.5, math.nan], [0.5, 0.5]], "from 0 to 1, not nan"),
        ([[0.5, 0.7], [0.4, 0.5]], r"P\[0, 1\] and P\[1, 0\] are 0.7 and 0.4"),
        ([[0.5, 0.5]], "square matrix"),
    ],
)
def test_what_is_no_game_is_refused(wins: list[list[float]], says: str) -> None:
    with pytest.raises(PanoplyError, match=says):
        games.checked(wins)


def test_other_bad_input() -> None:
    with pytest.raises(PanoplyError, match="at least 3 answers, not 2"):
        games.cyclic(2)
    with pytest.raises(PanoplyError, match="tau from 0.01 on, not 0.001"):
        games.regularised_nash(WINS, REFERENCE, 0.001)


def test_the_table_of_updates() -> None:
    """`panoply run preference-games`: who asks twice takes half as many steps, and a game of one's own is taken."""
    table = functions.call("preference-games", {"queries": 50, "tau": 0.1}, seed=1001)
    assert table["nash"]["KL to Nash"] == 0
    assert {name: row["queries"] for name, row in table.items() if row["queries"] > 1} == {
        **dict.fromkeys(
            ("sppo", "iterative dpo", "online-ipo", "ipo-md", "nash-md", "inpo", "no extrapolation"), 50
        ),
        "nash-mp": 50,
        "nash-prox": 48,
    }
    steps = games.course(
        lambda p: games.proximal(games.random_circle(1001), games.random_reference(1001), p, tau=0.1),
        games.random_reference(1001),
        25,
    )
    nash = games.regularised_nash(games.random_circle(1001), games.random_reference(1001), 0.1)
    assert table["nash-mp"]["KL to Nash"] == games.kl(nash, steps.last)
    own = {"wins": ((0.5, 0.9), (0.1, 0.5)), "reference": (0.4, 0.6), "tau": 0.5, "queries": 4}
    assert functions.call("preference-games", own)["reference"]["exploited"] == pytest.approx(
        0.5 * 0.4 + 0.9 * 0.6 - 0.5
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"wins": ((0.5, 1.5), (-0.5, 0.5))}, "from 0 to 1, not 1.5"),
        ({"wins": ((0.5, 0.5), (0.5,))}, "unequal lengths"),
        ({"reference": (0.5, 0.5)}, "for each of the 4 answers"),
        ({"queries": 1}, "from 4 to 100000, not 1"),
    ],
)
def test_the_table_refuses(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(PanoplyError, match=says):
        functions.call("preference-games", settings)
