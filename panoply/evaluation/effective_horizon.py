"""How hard a small MDP is to learn from random exploration (Laidlaw et al. 2023, arXiv 2312.08369).

Q¹ is what acting at random earns, and Q^{k+1}(s, a) = r + γ·E[max_a′ Q^k(s′, a′)]. Where acting greedily by Q^k is
optimal, the problem is *k-QVI-solvable*, and SQIRL needs about A^H̄ samples to find out, for the effective horizon

    H̄ = min_k H̄_k,   H̄_k = k + log_A(1/Δ_k²),

where Δ_k is the smallest gap of Q^k, in units of what episodes can earn, between the best action and the best of those
that are not optimal, over what the greedy policy comes through. Values are exact, over a horizon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from panoply.worlds.control.mdp import MDP, greedy
from panoply.worlds.control.world import Array

CLOSE = 1e-9


@dataclass(frozen=True)
class EffectiveHorizon:
    """H̄_k for every k that solves the MDP."""

    by_k: dict[int, float]

    @property
    def k(self) -> int | None:
        """The least k whose greedy policy is optimal, if any of those that were tried."""
        return min(self.by_k, default=None)

    @property
    def value(self) -> float:
        """H̄."""
        return min(self.by_k.values(), default=math.inf)


def effective_horizon(
    mdp: MDP, horizon: int, gamma: float = 1.0, most: int | None = None
) -> EffectiveHorizon:
    """H̄_k of an MDP for k up to `most` (as far as the horizon, where everything is solved)."""
    best, found = mdp.optimal(gamma, horizon), {}
    for k, q in enumerate(ladder(mdp, horizon, most or horizon, gamma), 1):
        gap = _gap(mdp, q, best) / _range(mdp, horizon, gamma)
        if gap > CLOSE:
            found[k] = k + math.log(1 / min(gap, 1.0) ** 2, mdp.actions)
    return EffectiveHorizon(found)


def ladder(mdp: MDP, horizon: int, count: int, gamma: float = 1.0) -> list[Array]:
    """Q¹ … Q^count, each [horizon, states, actions]."""
    uniform = np.full((mdp.states, mdp.actions), 1 / mdp.actions)
    rungs = [mdp.evaluate(uniform, gamma, horizon)]
    while len(rungs) < count:
        after = np.concatenate([rungs[-1].max(-1)[1:], np.zeros((1, mdp.states))])
        rungs.append(np.stack([mdp.backup(values, gamma) for values in after]))
    return rungs


def _gap(mdp: MDP, q: Array, best: Array) -> float:
    """By how much q prefers optimal actions where its greedy policy goes; 0 or less where it prefers others."""
    good = best >= best.max(-1, keepdims=True) - CLOSE
    seen = (mdp.occupancy(greedy(q), 1.0, len(q)).sum(-1) > 0) & ~good.all(-1)
    ahead = np.where(good, q, -np.inf).max(-1) - np.where(good, -np.inf, q).max(-1)
    return float(ahead[seen].min()) if seen.any() else math.inf


def _range(mdp: MDP, horizon: int, gamma: float) -> float:
    """What the best policy earns more than the worst."""
    other = MDP(mdp.transitions, -mdp.rewards, mdp.start, mdp.terminal)
    return max(mdp.best(gamma, horizon) + other.best(gamma, horizon), CLOSE)


# ------------------------------------------------------------------ SQIRL on tables


def fitted(steps: dict[str, Array], states: int, actions: int, k: int, gamma: float = 1.0) -> Array:
    """Q^k[s, a] by exact regression on steps: what SQIRL's networks come to where they are tables.

    steps   `state`, `action`, `reward`, `after` (the next state), `going` (whether there was a next step), and
            `return` (to go). What was never tried is worth 0.
    """
    pair = steps["state"] * actions + steps["action"]
    count = np.bincount(pair, minlength=states * actions)
    target = steps["return"]
    for _ in range(k):
        total = np.bincount(pair, target, minlength=states * actions)
        q = (total / np.maximum(count, 1)).reshape(states, actions)
        target = steps["reward"] + gamma * steps["going"] * q.max(-1)[steps["after"]]
    return q


def tabular_sqirl(
    mdp: MDP, horizon: int, k: int, episodes: int, rng: np.random.Generator, gamma: float = 1.0
) -> tuple[Array, int]:
    """The policy [horizon, states, actions] that SQIRL finds with so many episodes a turn, and the steps it took."""
    policy = np.full((horizon, mdp.states, mdp.actions), 1 / mdp.actions)
    taken = 0
    for t in range(horizon):
        played = _play(mdp, policy, horizon, episodes, rng)
        taken += int(played["live"].sum())
        to_go = np.zeros(episodes)
        returns = np.zeros((horizon, episodes))
        for turn in reversed(range(horizon)):
            to_go = returns[turn] = played["reward"][turn] + gamma * to_go
        kept = played["live"].copy()
        kept[:t] = False
        steps = {name: column[kept] for name, column in (played | {"return": returns}).items()}
        policy[t] = greedy(fitted(steps, mdp.states, mdp.actions, k, gamma))
    return policy, taken


def _play(mdp: MDP, policy: Array, horizon: int, episodes: int, rng: np.random.Generator) -> dict[str, Array]:
    """Columns [horizon, episodes] of episodes side by side."""
    columns: dict[str, list[Array]] = {n: [] for n in ("state", "action", "reward", "after", "going", "live")}
    at = rng.choice(mdp.states, episodes, p=mdp.start)
    live = ~mdp.terminal[at]
    for turn in range(horizon):
        chances = policy[turn][at].cumsum(-1)[:, :-1]
        action = (rng.random((episodes, 1)) >= chances).sum(-1)
        to = (rng.random((episodes, 1)) >= mdp.cumulative[at, action]).sum(-1)
        going = live & ~mdp.terminal[to] & (turn + 1 < horizon)
        reward = np.where(live, mdp.rewards[at, action, to], 0.0)
        for name, column in zip(columns, (at, action, reward, to, going, live), strict=True):
            columns[name].append(column)
        at, live = to, going
    return {name: np.stack(several) for name, several in columns.items()}
