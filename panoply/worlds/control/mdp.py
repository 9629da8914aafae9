"""Small Markov decision processes whose every value is known: exact dynamic programming in float64.

A policy is [states, actions], or [horizon, states, actions] where it depends on the time. With a `horizon` values are
of the steps that are left; without one they are discounted sums to infinity, and `gamma` must be below 1 unless every
episode ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from panoply.errors import PanoplyError
from panoply.worlds.control.world import Array


@dataclass(frozen=True)
class MDP:
    """Transitions P[s, a, s'], rewards R[s, a, s'], where episodes start, and which states end them."""

    transitions: Array
    rewards: Array
    start: Array
    terminal: Array

    def __post_init__(self) -> None:
        states, actions, _ = self.transitions.shape
        if self.rewards.shape != (states, actions, states):
            raise PanoplyError(f"Rewards have the shape of transitions, {(states, actions, states)}.")
        if not np.allclose(self.transitions.sum(-1), 1) or not np.isclose(self.start.sum(), 1):
            raise PanoplyError("The probabilities of what comes next, and of where to start, sum to 1.")

    @property
    def states(self) -> int:
        return len(self.start)

    @property
    def actions(self) -> int:
        return int(self.transitions.shape[1])

    @cached_property
    def flow(self) -> Array:
        """Transitions that lead on: nothing comes after a terminal state."""
        return self.transitions * (~self.terminal)[:, None, None] * (~self.terminal)[None, None, :]

    @cached_property
    def reward(self) -> Array:
        """R[s, a], the expected one; 0 in terminal states."""
        expected: Array = (self.transitions * self.rewards).sum(-1)
        return expected * (~self.terminal)[:, None]

    @cached_property
    def cumulative(self) -> Array:
        """Sums of the transitions, for drawing."""
        return np.cumsum(self.transitions, -1)[..., :-1]

    # -------------------------------------------------------------- values

    def backup(self, values: Array, gamma: float) -> Array:
        """Q[s, a] of acting once and being worth `values` after it."""
        worth: Array = self.reward + gamma * (self.flow @ values)
        return worth

    def optimal(self, gamma: float = 1.0, horizon: int | None = None, close: float = 1e-12) -> Array:
        """Q*: [states, actions], or [horizon, states, actions] where the first axis is the time."""
        if horizon is not None:
            stages = [np.zeros((self.states, self.actions))]
            for _ in range(horizon):
                stages.append(self.backup(stages[-1].max(-1), gamma))
            return np.stack(stages[:0:-1])
        q = np.zeros((self.states, self.actions))
        for _ in range(100_000):
            last, q = q, self.backup(q.max(-1), gamma)
            if np.abs(q - last).max() <= close * max(1.0, np.abs(q).max()):
                return q
        raise PanoplyError(f"Values do not settle with gamma {gamma:g}: there are episodes without an end.")

    def evaluate(self, policy: Array, gamma: float = 1.0, horizon: int | None = None) -> Array:
        """Q of a policy, in the form of `optimal`."""
        if horizon is not None:
            stages, values = [], np.zeros(self.states)
            for t in reversed(range(horizon)):
                stages.append(self.backup(values, gamma))
                values = (self._at(policy, t) * stages[-1]).sum(-1)
            return np.stack(stages[::-1])
        moves = np.einsum("sa,sat->st", policy, self.flow)
        system = np.eye(self.states) - gamma * moves
        if np.linalg.cond(system) > 1e12:
            raise PanoplyError(f"With gamma {gamma:g} this policy has episodes without an end, and no value.")
        return self.backup(np.linalg.solve(system, (policy * self.reward).sum(-1)), gamma)

    def value(self, policy: Array, gamma: float = 1.0, horizon: int | None = None) -> float:
        """The expected return of a policy from the start."""
        q = self.evaluate(policy, gamma, horizon)
        first = q if horizon is None else q[0]
        return float(self.start @ (self._at(policy, 0) * first).sum(-1))

    def best(self, gamma: float = 1.0, horizon: int | None = None) -> float:
        """The expected return of the best policy."""
        q = self.optimal(gamma, horizon)
        return float(self.start @ (q if horizon is None else q[0]).max(-1))

    # -------------------------------------------------------------- where a policy goes

    def occupancy(self, policy: Array, gamma: float = 1.0, horizon: int | None = None) -> Array:
        """Expected visits d[s, a], discounted; by time, [horizon, s, a], where there is a horizon."""
        if horizon is not None:
            here, stages = self.start * ~self.terminal, []
            for t in range(horizon):
                stages.append(gamma**t * here[:, None] * self._at(policy, t))
                here = np.einsum("s,sa,sat->t", here, self._at(policy, t), self.flow)
            return np.stack(stages)
        moves = np.einsum("sa,sat->st", policy, self.flow)
        visits = np.linalg.solve(np.eye(self.states) - gamma * moves.T, self.start * ~self.terminal)
        return visits[:, None] * policy

    def gradient(self, logits: Array, gamma: float = 1.0, horizon: int | None = None) -> Array:
        """∂J/∂logits of a softmax policy: Σ_t d_t(s) π(a|s) A_t(s, a)."""
        policy = softmax(logits)
        visits, q = self.occupancy(policy, gamma, horizon), self.evaluate(policy, gamma, horizon)
        ahead = visits * (q - (policy * q).sum(-1, keepdims=True))
        total: Array = ahead if horizon is None or logits.ndim == 3 else ahead.sum(0)
        return total

    def concentrability(self, policy: Array, data: Array, horizon: int) -> float:
        """max d^π(s, a)/μ(s, a) over what the policy does, for data with shares μ[s, a]; ∞ where μ lacks it."""
        visits = self.occupancy(policy, 1.0, horizon).sum(0)
        visits = visits / visits.sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(visits > 0, visits / data, 0.0)
        return float(ratios.max())

    def coverability(self, horizon: int) -> float:
        """max_t Σ_{s,a} max_π d_t^π(s, a): how well the best data could cover all policies (Xie et al. 2023)."""
        there, totals = np.eye(self.states) * ~self.terminal, []
        for _ in range(horizon):  # there[s, g] is the largest probability of being in g so many steps after s
            totals.append(self.actions * (self.start @ there).sum())
            there = np.einsum("sat,tg->sag", self.flow, there).max(1)
        return float(max(totals))

    def _at(self, policy: Array, t: int) -> Array:
        return policy[t] if policy.ndim == 3 else policy


def softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    shares: Array = raised / raised.sum(-1, keepdims=True)
    return shares


def greedy(q: Array, ties: float = 1e-9) -> Array:
    """The policy that takes the best actions, all that tie with equal probability."""
    best = q >= q.max(-1, keepdims=True) - ties
    shares: Array = best / best.sum(-1, keepdims=True)
    return shares
