"""Compounding error, exactly: what imitation loses over T steps, and what feedback on own episodes saves.

At every step a symbol is seen and one of some actions is right. A wrong one leads off the track, where the symbols are
others, and a right one leads back. Whoever demonstrates is never off the track, so imitation says nothing of what to do
there: with an error of ε a step it loses about εT²/2 steps. Annotators who compare own episodes see both.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from panoply.seeds import numpy_rng
from panoply.worlds.control.world import Array


class Task(NamedTuple):
    """Which action is right for each symbol; the first `on` of them are seen on the track."""

    right: Array
    on: int = 50
    actions: int = 16

    @classmethod
    def drawn(cls, seed: int, on: int = 50, off: int = 8, actions: int = 16) -> Task:
        return cls(numpy_rng("track", seed).integers(0, actions, on + off), on, actions)


def imitated(task: Task, steps: int, rng: np.random.Generator, doubt: float = 0.01) -> Array:
    """[symbols, actions]: how often each action was shown in so many demonstrated steps; where none was, all alike."""
    counts = np.zeros((len(task.right), task.actions))
    np.add.at(counts, (at := rng.integers(0, task.on, steps), task.right[at]), 1.0)
    policy: Array = (counts + doubt / task.actions) / (counts.sum(1, keepdims=True) + doubt)
    return policy


def errors(task: Task, policy: Array) -> tuple[float, float]:
    """How likely a step is wrong on the track, and off it."""
    wrong = 1 - policy[np.arange(len(task.right)), task.right]
    return float(wrong[: task.on].mean()), float(wrong[task.on :].mean())


def wrong_steps(on: float, off: float, length: int) -> float:
    """The expected number of wrong steps of an episode: after a wrong one the next is off the track."""
    total = astray = 0.0
    for _ in range(length):
        astray = (1 - astray) * on + astray * off
        total += astray
    return total


def played(
    task: Task, policy: Array, episodes: int, length: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Of own episodes: [episodes, symbols · actions], how often each action was taken, and how many were right."""
    taken = np.zeros((episodes, len(task.right) * task.actions))
    good, astray = np.zeros(episodes), np.zeros(episodes, bool)
    edges, row = policy.cumsum(1), np.arange(episodes)
    for _ in range(length):
        draw = rng.random(episodes)
        off = task.on + (draw * (len(task.right) - task.on)).astype(int)
        seen = np.where(astray, off, (draw * task.on).astype(int))
        action = (rng.random((episodes, 1)) > edges[seen]).sum(1).clip(max=task.actions - 1)
        taken[row, seen * task.actions + action] += 1
        astray = action != task.right[seen]
        good += ~astray
    return taken, good


def preferred(
    task: Task,
    policy: Array,
    pairs: int,
    length: int,
    rng: np.random.Generator,
    beta: float = 0.05,
    ridge: float = 10.0,
) -> Array:
    """The policy after RLHF: π ∝ π₀·exp(r/β), with r fitted to which of two own episodes annotators prefer.

    They prefer the one with more right steps, and say nothing of which these are; r is one number for each action at
    each symbol, by ridge regression of the answers on the difference of what was done.
    """
    (done, good), (other, less) = (played(task, policy, pairs, length, rng) for _ in range(2))
    rows, said = done - other, np.sign(good - less)
    reward = np.linalg.solve(rows.T @ rows + ridge * np.eye(rows.shape[1]), rows.T @ said)
    logits = np.log(policy) + reward.reshape(policy.shape) / beta
    weights = np.exp(logits - logits.max(1, keepdims=True))
    found: Array = weights / weights.sum(1, keepdims=True)
    return found
