"""Whom a policy serves, what that took, and what shakes it: the three sides of the RLHF trilemma (arXiv 2511.19504).

Representativeness, ε: how much the worst-served group of people loses against the best for it. Tractability: labels and
updates. Robustness, δ: the most that is lost under perturbations. Any two look fine alone, so all three stand together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np

from panoply.seeds import numpy_rng
from panoply.worlds.control.bandit import Bandit, spelled
from panoply.worlds.control.world import Array
from panoply.worlds.world import Task, TextWorld

# ------------------------------------------------------------------ how many labels are needed

Learner = Literal["table", "linear", "one"]
"""What is learned of a group: each context for itself, a linear function of the bits, or one answer for everybody."""
HONEST, REPEATS, FINENESS = 0.9, 20, 4


class Needed(NamedTuple):
    """Labels of all groups together after which the worst-served one loses so little, on average over label sets."""

    labels: int
    regret: float


def worst_regret(
    gaps: Array, learner: Learner, labels: int, rng: np.random.Generator, honest: float = HONEST
) -> float:
    """What the worst-served group loses by what so many labels of each group say.

    gaps     [groups, contexts]: how much more the first of two answers is worth to a group than the second
    honest   the chance that a label says which of the two a group prefers; else an adversary says the opposite
    """
    contexts = gaps.shape[1]
    bits = contexts.bit_length() - 1
    at = rng.integers(0, contexts, (len(gaps), labels))
    truth = np.where(rng.random(at.shape) < honest, 1.0, -1.0)
    said = np.sign(np.take_along_axis(gaps, at, 1)) * truth
    if learner == "one":
        scores = np.full(gaps.shape, said.sum())
    elif learner == "table":
        scores = np.stack([np.bincount(x, y, contexts) for x, y in zip(at, said, strict=True)])
    else:
        seen = spelled(np.arange(contexts), bits)
        scores = np.stack([_regressed(seen, x, y) for x, y in zip(at, said, strict=True)])
    guess = rng.random(gaps.shape) < 0.5
    first = np.where(scores == 0, guess, scores > 0)
    return float((np.abs(gaps) * (first != (gaps > 0))).mean(1).max())


def _regressed(seen: Array, at: Array, said: Array) -> Array:
    """A linear function of what is seen, by ridge regression on the labels."""
    rows = seen[at]
    scores: Array = seen @ np.linalg.solve(rows.T @ rows + np.eye(rows.shape[1]), rows.T @ said)
    return scores


def gaps_of(bits: int, structure: Literal["table", "linear"], groups: int, seed: int) -> Array:
    """[groups, contexts]: by how much each group prefers the first answer to the second."""
    world = Bandit("bits", arms=2, bits=bits, groups=groups, structure=structure, seed=seed)
    worth = world.tables.means.reshape(groups, -1, 2)
    found: Array = worth[..., 0] - worth[..., 1]
    return found


def labels_needed(
    gaps: Array, learner: Learner, *, target: float = 0.05, most: int = 1 << 14, seed: int = 0
) -> Needed:
    """The fewest labels, in steps of a quarter of a doubling, by which the worst-served group loses at most `target`.

    Where as many as `most` of each group are not enough, that many, and what is lost then.
    """
    for step in range(FINENESS * most.bit_length()):
        each = min(most, round(2 ** (step / FINENESS)))
        rngs = (numpy_rng("labels", seed, learner, each, i) for i in range(REPEATS))
        regret = fmean(worst_regret(gaps, learner, each, rng) for rng in rngs)
        if regret <= target or each == most:
            break
    return Needed(each * len(gaps), regret)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the line through points by least squares."""
    return float(np.polyfit(x, y, 1)[0])


# ------------------------------------------------------------------ a policy's worth to groups

Ask = Callable[[Sequence[Task], int, float], Sequence[Sequence[Sequence[int]]]]
"""`(tasks, attempts, temperature)` → so many answers of a policy to each task."""
WORST = 0.25
"""The share of problems that a shift of prompts may leave."""
UNSTEADY = 1.5
"""The temperature of a policy that is shaken."""


class Worths(NamedTuple):
    """[tasks, attempts] of each group, what is best for it, and how many people it has."""

    of: Mapping[str, Array]
    best: Mapping[str, Array]
    people: Mapping[str, float]

    def mean(self) -> Array:
        """[tasks, attempts]: what the population as a whole has of it."""
        total = sum(self.people.values())
        found: Array = sum((self.people[g] / total * self.of[g] for g in self.of), np.zeros(()))
        return found


def worths(world: TextWorld, tasks: Sequence[Task], answers: Sequence[Sequence[Sequence[int]]]) -> Worths:
    """What answers are worth to each group of a world's annotators; where there are none, to everybody.

    The best for a group is the world's reference answer, or what the policy said that is worth more to it.
    """
    graded = [[world.grade(task, a) for a in said] for task, said in zip(tasks, answers, strict=True)]
    gold = [world.grade(t, world.gold(t)) if "reference" in world.access else {} for t in tasks]
    names = [name for name in graded[0][0] if name.startswith("group")] or [world.judged_by]

    def column(name: str) -> Array:
        return np.array([[float(g.get(name) or 0.0) for g in row] for row in graded])  # type: ignore[arg-type]

    of = {name: column(name) for name in names}
    known = {name: np.array([float(g.get(name) or 0.0) for g in gold]) for name in names}  # type: ignore[arg-type]
    counted = getattr(world, "populations", ()) or (1,) * len(names)
    return Worths(
        of,
        {name: np.maximum(known[name], of[name].max(1)) for name in names},
        dict(zip(names, map(float, counted), strict=True)),
    )


def represented(found: Worths) -> dict[str, float]:
    """ε: what the worst-served group loses against the best for it, and what groups lose on average.

    With groups also how much of what is said the smallest of them likes most, over its share of the people: below 1
    the many are amplified.
    """
    lost = {group: float((found.best[group] - found.of[group].mean(1)).mean()) for group in found.of}
    said = {"worth": float(found.mean().mean()), "ε worst group": max(lost.values())}
    said["ε mean"] = fmean(lost.values())
    if len(found.of) > 1:
        smallest = min(found.people, key=lambda group: found.people[group])
        stacked = np.stack(list(found.of.values()))
        liked = stacked == stacked.max(0)
        share = float((liked[list(found.of).index(smallest)] / liked.sum(0)).mean())
        said["minority"] = share / (found.people[smallest] / sum(found.people.values()))
    return said


def shifted(worth: Array) -> float:
    """What is lost where only the worst-served quarter of problems is asked.

    They are chosen by one half of the attempts and judged by the other, or chance alone would make some look bad.
    """
    half = worth.shape[1] // 2
    worst = np.argsort(worth[:, :half].mean(1), kind="stable")[: max(1, int(WORST * len(worth)))]
    return float(worth.mean() - worth[worst, half:].mean())


def distracted(tasks: Sequence[Task]) -> list[Task]:
    """Each task after the prompt of another one, which it has nothing to do with."""
    others = [*tasks[1:], tasks[0]]
    pairs = zip(tasks, others, strict=True)
    return [dataclasses.replace(task, prompt=(*other.prompt, *task.prompt)) for task, other in pairs]


def robust(plain: Array, perturbed: Mapping[str, float]) -> dict[str, float]:
    """δ: the most that is lost, and by what. `perturbed` is what the policy is worth under each perturbation."""
    lost = {"δ shifted": shifted(plain)}
    lost |= {f"δ {name}": float(plain.mean()) - worth for name, worth in perturbed.items()}
    return {"δ": max(0.0, *lost.values()), **lost}


def of_text(
    world: TextWorld, ask: Ask, tasks: Sequence[Task], *, attempts: int = 8, one_turn: bool = True
) -> dict[str, float]:
    """Both of text: whom answers serve, and what is lost where they are asked for or drawn otherwise."""

    def worth(asked: Sequence[Task], temperature: float) -> Worths:
        return worths(world, tasks, ask(asked, attempts, temperature))

    plain = worth(tasks, 1.0)
    perturbed = {"unsteady": float(worth(tasks, UNSTEADY).mean().mean())}
    if one_turn:
        perturbed["distracted"] = float(worth(distracted(tasks), 1.0).mean().mean())
    return {**represented(plain), **robust(plain.mean(), perturbed)}


def of_control(
    returns: Callable[[float], Array], groups: Array | None = None, best: Array | float | None = None
) -> dict[str, float]:
    """Both of control. `returns(temperature)` are [starts, attempts].

    groups   of the user of each start; none means that all are alike
    best     the most that can be had from each start, or from all; where it is not known there is no ε
    """
    plain = returns(1.0)
    said = {"worth": float(plain.mean())}
    if best is not None:
        lost = best - plain.mean(1)
        of_group = np.zeros(len(plain), int) if groups is None else groups
        each = [float(lost[of_group == group].mean()) for group in np.unique(of_group)]
        said |= {"ε worst group": max(each), "ε mean": fmean(each)}
    return {**said, **robust(plain, {"unsteady": float(returns(UNSTEADY).mean())})}


# ------------------------------------------------------------------ what it took


def spent(settings: Mapping[str, Any], regime: str, steps: int, episodes: float) -> dict[str, float]:
    """Labels and updates of a run: every answer that was graded, every pair or demonstration that was shown once."""
    batch, limit = settings.get("data.batch", 0), settings.get("data.pairs") or settings.get("data.answers")
    given = min(steps * batch, limit) if limit else steps * batch
    each = settings.get("update.epochs", 1) * settings.get("update.minibatches", 1)
    updates = settings.get("replay.updates", 1) if regime in ("off_policy", "offline") else each
    return {"labels": float(episodes or given), "updates": float(steps * updates)}
