"""Off-policy estimators on a tabular MDP, against exact values: by enumerating every episode, and on logged data."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from panoply.errors import PanoplyError
from panoply.evaluation import off_policy
from panoply.evaluation.off_policy import Episodes
from panoply.worlds.control.mdp import MDP, softmax
from panoply.worlds.control.tabular import Tabular
from panoply.worlds.logged.behaviour import behave
from panoply.worlds.logged.data import LoggedData

GAMMA, HORIZON = 0.9, 3
RNG = np.random.default_rng(0)
BEHAVIOUR, TARGET = softmax(RNG.normal(size=(3, 2))), softmax(3 * RNG.normal(size=(3, 2)))


def enumerated(mdp: MDP) -> tuple[LoggedData, Any]:
    """Every episode of three steps that can happen, and how likely each is under the behaviour policy."""
    rows: list[Any] = []
    chances = []
    steps = list(itertools.product(range(3), range(2), range(3)))
    for path in itertools.product(steps, repeat=HORIZON):
        chance, at = 1.0, None
        for s, a, t in path:
            chance *= (
                (mdp.start[s] if at is None else float(s == at)) * BEHAVIOUR[s, a] * mdp.transitions[s, a, t]
            )
            at = t
        if chance > 0:
            chances.append(chance)
            rows += [(len(chances) - 1, i, s, a, mdp.rewards[s, a, t], t) for i, (s, a, t) in enumerate(path)]
    episode, turn, seen, action, reward, after = (np.array(c) for c in zip(*rows, strict=True))
    last = turn == HORIZON - 1
    columns = {
        "observation": seen,
        "action": action,
        "reward": reward,
        "terminated": np.zeros(len(seen), bool),
        "truncated": last,
        "episode": episode,
        "turn": turn,
        "final": after[last],
        "logp": np.log(BEHAVIOUR[seen, action]),
    }
    return LoggedData(columns), np.array(chances)


def target(seen: Any) -> Any:
    return TARGET[seen]


MDP3 = Tabular("random", size=3, branching=2, seed=3).mdp
DATA, CHANCES = enumerated(MDP3)
EXACT = MDP3.value(TARGET, GAMMA, HORIZON)


def test_every_episode_is_there_once() -> None:
    assert CHANCES.sum() == pytest.approx(1)
    earned = Episodes(DATA, lambda seen: BEHAVIOUR[seen]).reward @ (GAMMA ** np.arange(HORIZON))
    assert CHANCES @ earned == pytest.approx(MDP3.value(BEHAVIOUR, GAMMA, HORIZON))


def test_importance_sampling_is_unbiased() -> None:
    of = Episodes(DATA, target)
    assert CHANCES @ off_policy.importance_terms(of, GAMMA) == pytest.approx(EXACT, rel=1e-12)
    assert CHANCES @ off_policy.per_decision_terms(of, GAMMA) == pytest.approx(EXACT, rel=1e-12)
    assert MDP3.value(BEHAVIOUR, GAMMA, HORIZON) != pytest.approx(EXACT, rel=1e-2)


def test_doubly_robust_is_unbiased_whatever_q_is_and_varies_less_where_it_is_right() -> None:
    of = Episodes(DATA, target)
    seen, action, turn = (DATA.columns[name] for name in ("observation", "action", "turn"))
    variance = {}
    stages = MDP3.evaluate(TARGET, GAMMA, HORIZON)
    for name, q in (("none", 0 * stages), ("right", stages), ("wrong", RNG.normal(size=stages.shape))):
        v = (TARGET * q).sum(-1)
        terms = off_policy.doubly_robust_terms(of, GAMMA, q[turn, seen, action], v[turn, seen])
        assert CHANCES @ terms == pytest.approx(EXACT, rel=1e-12)
        variance[name] = CHANCES @ (terms - EXACT) ** 2
    plain = CHANCES @ (off_policy.per_decision_terms(of, GAMMA) - EXACT) ** 2
    assert variance["none"] == pytest.approx(plain)
    assert variance["right"] < 0.5 * plain < variance["wrong"]


def test_weights_by_hand() -> None:
    """Two episodes of one step, b = ½: the target takes the first action with 0.8. Ratios 1.6 and 0.4."""
    columns = {
        "observation": np.zeros(2, np.int64),
        "action": np.array([0, 1]),
        "reward": np.array([1.0, 3.0]),
        "terminated": np.ones(2, bool),
        "truncated": np.zeros(2, bool),
        "episode": np.arange(2),
        "turn": np.zeros(2, np.int64),
        "final": np.zeros(2, np.int64),
        "logp": np.log([0.5, 0.5]),
    }
    data, policy = LoggedData(columns), lambda seen: np.tile([0.8, 0.2], (len(seen), 1))
    assert off_policy.importance(data, policy).value == pytest.approx((1.6 * 1 + 0.4 * 3) / 2)
    assert off_policy.weighted_importance(data, policy).value == pytest.approx((1.6 + 1.2) / 2.0)
    assert off_policy.importance(data, policy).effective == pytest.approx(4 / (1.6**2 + 0.4**2))
    robust = off_policy.doubly_robust(data, policy, lambda seen: np.tile([1.0, 2.0], (len(seen), 1)))
    assert robust.value == pytest.approx((1.2 + (1.2 + 0.4 * 1)) / 2)


def test_fitted_q_is_exact_on_data_that_has_everything() -> None:
    """Each state, action and outcome once as often as it happens: the empirical MDP is the MDP."""
    world = Tabular("corridor", size=4, slip=0.25)
    mdp, rows = world.mdp, []
    for s, a in itertools.product(range(3), range(2)):
        for t in range(4):
            rows += [(s, a, mdp.rewards[s, a, t], t)] * round(4 * mdp.transitions[s, a, t])
    seen, action, reward, after = (np.array(c) for c in zip(*rows, strict=True))
    n = len(seen)
    columns = {
        "observation": seen,
        "action": action,
        "reward": reward,
        "terminated": mdp.terminal[after],
        "truncated": ~mdp.terminal[after],
        "episode": np.arange(n),
        "turn": np.zeros(n, np.int64),
        "final": np.where(mdp.terminal[after], 0, after),  # what is seen after an end is worth nothing
    }
    policy = softmax(np.random.default_rng(2).normal(size=(4, 2)))
    fitted = off_policy.fitted_q(LoggedData(columns), lambda s: policy[s], off_policy.one_hot(4), 0.9)
    np.testing.assert_allclose(fitted(np.arange(3)), mdp.evaluate(policy, 0.9)[:3], atol=1e-7)


def test_estimates_from_logged_data_are_near_the_truth() -> None:
    world = Tabular("lock", size=3, actions=2, lure=0.1, slip=0.2)
    data = behave(world, "noisy", 6000, 0)
    policy = softmax(np.random.default_rng(5).normal(size=(world.mdp.states, 2)))
    exact = world.mdp.value(policy, 1.0, 3)
    q = off_policy.fitted_q(data, lambda s: policy[s], off_policy.one_hot(world.mdp.states), 1.0)
    found = {
        "is": off_policy.importance(data, lambda s: policy[s]),
        "wis": off_policy.weighted_importance(data, lambda s: policy[s]),
        "pdis": off_policy.per_decision(data, lambda s: policy[s]),
        "wpdis": off_policy.weighted_per_decision(data, lambda s: policy[s]),
        "dr": off_policy.doubly_robust(data, lambda s: policy[s], q),
    }
    for name, estimate in found.items():
        assert abs(estimate.value - exact) < 4 * estimate.error, name
    assert found["dr"].error < found["is"].error
    assert off_policy.direct(data, lambda s: policy[s], q) == pytest.approx(exact, abs=0.01)


def test_what_is_missing_is_said() -> None:
    without = LoggedData({k: v for k, v in DATA.columns.items() if k != "logp"})
    with pytest.raises(PanoplyError, match="needs the behaviour's probabilities: the column logp"):
        off_policy.importance(without, target)
    never = np.eye(2)[1 - DATA.columns["action"][:1]]
    short = LoggedData({k: v[:1] if k != "truncated" else np.ones(1, bool) for k, v in DATA.columns.items()})
    with pytest.raises(PanoplyError, match="every episode has weight 0"):
        off_policy.weighted_importance(short, lambda seen: never)


def two_episodes() -> LoggedData:
    """Two episodes of two steps in one state, all actions 0, which the target takes twice or half as often."""
    columns = {
        "observation": np.array([0, 1, 2, 3]),
        "action": np.zeros(4, int),
        "reward": np.array([1.0, 2.0, 3.0, 4.0]),
        "terminated": np.array([False, True, False, True]),
        "truncated": np.zeros(4, bool),
        "episode": np.array([0, 0, 1, 1]),
        "turn": np.array([0, 1, 0, 1]),
        "final": np.array([0, 0]),
        "logp": np.log(np.full(4, 0.4)),
    }
    return LoggedData(columns)


def test_by_hand() -> None:
    """Ratios 2, 2 and ½, ½: products 2, 4 and ½, ¼; γ = ½.

    IS (4·2 + ¼·5)/2; PDIS (2·1 + ½·4·2 + ½·3 + ½·¼·4)/2; WPDIS divides by the mean weight of each time, 1.25 and 2.125.
    """

    def doubled(seen: Any) -> Any:
        chosen = np.array([0.8, 0.8, 0.2, 0.2])[seen]
        return np.stack([chosen, 1 - chosen], -1)

    data = two_episodes()
    assert off_policy.importance(data, doubled, 0.5).value == pytest.approx((4 * 2 + 0.25 * 5) / 2)
    assert off_policy.per_decision(data, doubled, 0.5).value == pytest.approx((2 + 4 + 1.5 + 0.5) / 2)
    expected = ((2 * 1 + 0.5 * 3) / 1.25 + 0.5 * (4 * 2 + 0.25 * 4) / 2.125) / 2
    assert off_policy.weighted_per_decision(data, doubled, 0.5).value == pytest.approx(expected)
    found = off_policy.importance(data, doubled, 0.5)
    assert found.error == pytest.approx(np.std([8.0, 1.25], ddof=1) / np.sqrt(2))
    assert found.effective == pytest.approx(4.25**2 / (16 + 0.0625))
    weighted = off_policy.weighted_importance(data, doubled, 0.5)
    assert weighted.value == pytest.approx((4 * 2 + 0.25 * 5) / 4.25)
    spread = np.sqrt((4 * (2 - weighted.value)) ** 2 + (0.25 * (5 - weighted.value)) ** 2)
    assert weighted.error == pytest.approx(spread / 4.25)
    with_q = off_policy.doubly_robust(data, doubled, lambda seen: np.full((len(seen), 2), 3.0), 0.5)
    # Σ_t γ^t·(ρ_0:t·(r − 3) + ρ_0:t−1·3)
    first, second = 2 * -2 + 3 + 0.5 * (4 * -1 + 2 * 3), 0.5 * 0 + 3 + 0.5 * (0.25 * 1 + 0.5 * 3)
    assert with_q.value == pytest.approx((first + second) / 2)
