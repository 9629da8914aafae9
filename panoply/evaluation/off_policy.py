"""What a policy is worth, from data that another one made.

With ρ_t = π(a_t|s_t)/b(a_t|s_t) and ρ_{0:t} their product, of episodes of at most T steps:

    IS     Σ_t γ^t ρ_{0:T−1} r_t
    WIS    Σ_i ρ_i G_i / Σ_i ρ_i over episodes i
    PDIS   Σ_t γ^t ρ_{0:t} r_t (Precup et al. 2000)
    WPDIS  the same with ρ_{0:t} over its mean at t
    DR     Σ_t γ^t [ρ_{0:t}(r_t − Q(s_t,a_t)) + ρ_{0:t−1} V(s_t)] (Jiang and Li 2016)

IS, PDIS and DR are unbiased, DR whatever Q is; the weighted ones are not, but vary less. They estimate the return up to
the end of the data's episodes. FQE (Le et al. 2019) fits Q of the policy itself and goes on beyond a time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from panoply.errors import PanoplyError
from panoply.worlds.logged.data import LoggedData

Array = NDArray[Any]
Target = Callable[[Array], Array]
"""Observations [n, …] → the probabilities [n, actions] of the policy that is to be judged."""


class Estimate(NamedTuple):
    value: float
    error: float
    """The standard error over episodes; of a weighted estimate, to first order."""
    effective: float
    """(Σ ρ)²/Σ ρ² over whole episodes: how many of the target's own the data amounts to."""


class Episodes:
    """Logged episodes side by side, [episodes, steps], with the ratios of a target policy."""

    def __init__(self, data: LoggedData, target: Target):
        columns = data.columns
        if "logp" not in columns:
            raise PanoplyError("Importance sampling needs the behaviour's probabilities: the column logp.")
        ends = np.flatnonzero(data.last) + 1
        self.number = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        self.time = np.arange(len(data)) - np.repeat(np.append(0, ends[:-1]), np.diff(ends, prepend=0))
        self.shape = (len(ends), int(self.time.max()) + 1)
        taken = target(columns["observation"])[np.arange(len(data)), columns["action"]]
        ratio = self.laid(taken / np.exp(columns["logp"].astype(np.float64)), empty=1.0)
        self.reward = self.laid(columns["reward"].astype(np.float64))
        self.weight = np.cumprod(ratio, 1)
        self.before = np.concatenate([np.ones((len(ends), 1)), self.weight[:, :-1]], 1)
        self.live = self.laid(np.ones(len(data))) > 0

    def laid(self, flat: Array, empty: float = 0.0) -> Array:
        """A column with a row for each episode; what comes after an end is `empty`."""
        table = np.full(self.shape, empty)
        table[self.number, self.time] = flat
        return table

    def discounts(self, gamma: float) -> Array:
        return gamma ** np.arange(self.shape[1])

    @property
    def effective(self) -> float:
        whole = self.weight[:, -1]
        total = float((whole**2).sum())
        return float(whole.sum()) ** 2 / total if total else 0.0


# ------------------------------------------------------------------ terms: one number an episode, whose mean estimates


def importance_terms(of: Episodes, gamma: float) -> Array:
    terms: Array = of.weight[:, -1] * (of.reward @ of.discounts(gamma))
    return terms


def per_decision_terms(of: Episodes, gamma: float) -> Array:
    terms: Array = (of.weight * of.reward) @ of.discounts(gamma)
    return terms


def doubly_robust_terms(of: Episodes, gamma: float, q: Array, v: Array) -> Array:
    """`q` and `v` are Q(s_t, a_t) and V(s_t) of the logged steps, flat as the data is."""
    q_t, v_t = of.laid(q), of.laid(v)
    terms: Array = (of.weight * (of.reward - q_t) + of.before * v_t) @ of.discounts(gamma)
    return terms


# ------------------------------------------------------------------ estimates


def importance(data: LoggedData, target: Target, gamma: float = 1.0) -> Estimate:
    """IS."""
    of = Episodes(data, target)
    return _mean(importance_terms(of, gamma), of)


def weighted_importance(data: LoggedData, target: Target, gamma: float = 1.0) -> Estimate:
    """WIS."""
    of = Episodes(data, target)
    weight, returns = of.weight[:, -1], of.reward @ of.discounts(gamma)
    if not weight.sum():
        raise PanoplyError("The target policy does nothing that is in the data: every episode has weight 0.")
    value = float(weight @ returns / weight.sum())
    error = float(np.sqrt(weight**2 @ (returns - value) ** 2) / weight.sum())
    return Estimate(value, error, of.effective)


def per_decision(data: LoggedData, target: Target, gamma: float = 1.0) -> Estimate:
    """PDIS."""
    of = Episodes(data, target)
    return _mean(per_decision_terms(of, gamma), of)


def weighted_per_decision(data: LoggedData, target: Target, gamma: float = 1.0) -> Estimate:
    """WPDIS: at each time the weights are divided by their mean over all episodes, ended ones included."""
    of = Episodes(data, target)
    of.weight = of.weight / np.maximum(of.weight.mean(0), 1e-300)
    return _mean(per_decision_terms(of, gamma), of)


def doubly_robust(
    data: LoggedData, target: Target, q: Callable[[Array], Array], gamma: float = 1.0
) -> Estimate:
    """DR with a given Q, observations → [n, actions], such as `fitted_q` returns."""
    of, seen = Episodes(data, target), data.columns["observation"]
    values = q(seen)
    taken = values[np.arange(len(data)), data.columns["action"]]
    return _mean(doubly_robust_terms(of, gamma, taken, (target(seen) * values).sum(-1)), of)


def _mean(terms: Array, of: Episodes) -> Estimate:
    spread = float(terms.std(ddof=1) / np.sqrt(len(terms))) if len(terms) > 1 else float("inf")
    return Estimate(float(terms.mean()), spread, of.effective)


# ------------------------------------------------------------------ fitted Q evaluation


def fitted_q(
    data: LoggedData,
    target: Target,
    features: Callable[[Array], Array],
    gamma: float,
    rounds: int = 500,
    ridge: float = 1e-9,
    close: float = 1e-10,
) -> Callable[[Array], Array]:
    """FQE, linear in features of the observation for each action: Q ← r + γ (1 − ended) Σ_a π(a|s') Q(s', a).

    With one-hot features (`one_hot`) it is exact on the empirical MDP. A time limit does not end anything.
    """
    columns, after = data.columns, data.next_observation
    policy, actions = target(after), target(columns["observation"][:1]).shape[1]
    goes_on = gamma * ~columns["terminated"]
    here, there = features(columns["observation"]), features(after)
    solve, rows = [], [np.flatnonzero(columns["action"] == action) for action in range(actions)]
    for own in (here[r] for r in rows):
        solve.append(np.linalg.solve(own.T @ own + ridge * np.eye(here.shape[1]), own.T))
    weights = np.zeros((here.shape[1], actions))
    for _ in range(rounds):
        aims = columns["reward"] + goes_on * (policy * (there @ weights)).sum(-1)
        new = np.stack([solve[action] @ aims[rows[action]] for action in range(actions)], -1)
        moved, weights = np.abs(new - weights).max(), new
        if moved <= close * max(1.0, np.abs(new).max()):
            break
        if not np.isfinite(new).all():
            raise PanoplyError("Fitted Q evaluation diverges with these features.")
    return lambda seen: features(seen) @ weights


def direct(data: LoggedData, target: Target, q: Callable[[Array], Array]) -> float:
    """The direct method: the mean of V = Σ_a π(a|s) Q(s, a) over the episodes' first states."""
    first = data.columns["observation"][np.append(True, data.last[:-1])]
    return float((target(first) * q(first)).sum(-1).mean())


def squares(data: LoggedData) -> Callable[[Array], Array]:
    """Features of what data observes: of a numbered state one for each, of numbers all products of two, in deviations
    from the data's mean."""
    seen = np.concatenate([data.columns["observation"], data.columns["final"]])
    if seen.ndim == 1:
        return one_hot(int(seen.max()) + 1)
    mean, spread = seen.mean(0), seen.std(0) + 1e-6

    def features(observed: Array) -> Array:
        plain = ((observed - mean) / spread).reshape(len(observed), -1)
        with_one = np.concatenate([np.ones((len(plain), 1)), plain], 1)
        first, second = np.triu_indices(with_one.shape[1])
        found: Array = with_one[:, first] * with_one[:, second]
        return found

    return features


def one_hot(states: int) -> Callable[[Array], Array]:
    """Features of a numbered state."""
    table = np.eye(states)
    return lambda seen: table[seen]
