"""Games of preference, solved exactly: two policies answer, and an annotator says whose answer is better.

    P[a, b]   how likely answer a is preferred to answer b, so P + Pᵀ = 1
    P·π       how often each answer wins against a policy
    game      J(π₁, π₂) = π₁·P·π₂ − τ·KL(π₁‖π_ref) + τ·KL(π₂‖π_ref)

Preferences may go round in a circle, and then no answer is the best one. What nobody can gain on is the Nash policy
of the game, which is unique for τ > 0 and the fixed point of π ∝ π_ref·exp(P·π/τ). Below are the updates of published
methods as they are with a table in place of a model and expectations in place of samples. Each takes a policy and
gives the next one; how many times it asks for P·π is what annotators are paid for.

    multiplicative_weights   SPPO (arXiv 2405.00675)       π·exp(η·Pπ), which knows no reference
    iterative_dpo            DPO on own pairs (arXiv 2402.04792)   π·exp(r/β) with scores r fitted to the pairs
    online_ipo               Online IPO, IPO-MD (arXiv 2403.08635)   one gradient step on pairs
    nash_md                  Nash-MD (arXiv 2312.00886)    a mirror step from, and against, a mixture with the reference
    inpo                     INPO (arXiv 2407.00617)       a mirror step on the regularised game
    proximal                 Nash-MP and Nash Prox (arXiv 2505.19731)   play again from the same anchor
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from panoply.errors import PanoplyError
from panoply.seeds import numpy_rng

Array = NDArray[np.float64]
Update = Callable[[Array], Array]
"""From a policy to the next one."""
LEAST_TAU = 0.01
"""Below it the Nash policy takes more steps to find than is sensible here."""

# ------------------------------------------------------------------ games


def cyclic(answers: int = 3, chance: float = 1.0) -> Array:
    """Each answer beats the one before it with that chance, and the first one the last; all else is even."""
    if answers < 3:
        raise PanoplyError(f"A circle of preferences has at least 3 answers, not {answers}.")
    wins = np.full((answers, answers), 0.5)
    for answer in range(answers):
        wins[answer, answer - 1], wins[answer - 1, answer] = chance, 1 - chance
    return checked(wins)


def random_circle(seed: int) -> Array:
    """Three answers that beat each other in a circle, nine times in ten or more, and a fourth that loses more often."""
    drawn = numpy_rng("preference circle", seed)
    above = np.full((4, 4), 0.5)
    strong = drawn.uniform(0.9, 1.0, 3)
    above[0, 1], above[1, 2], above[0, 2] = 1 - strong[0], 1 - strong[1], strong[2]
    above[:3, 3] = drawn.uniform(0.5, 0.8, 3)
    return _mirrored(above)


def random_game(seed: int, answers: int = 4, sharpness: float = 1.5) -> Array:
    """σ(sharpness·z) of normal z for every two answers: they have no worth of their own."""
    drawn = numpy_rng("preference game", seed).normal(size=(answers, answers))
    return _mirrored(1 / (1 + np.exp(-sharpness * drawn)))


def random_reference(seed: int, answers: int = 4, spread: float = 0.5) -> Array:
    """A policy to be regularised to: a softmax of normal logits."""
    return tilted(np.full(answers, 1 / answers), spread * numpy_rng("reference", seed).normal(size=answers))


def _mirrored(above: Array) -> Array:
    """The game whose preferences above the diagonal are these."""
    upper = np.triu(above, 1)
    return checked(upper + np.tril(1 - upper.T, -1) + 0.5 * np.eye(len(above)))


def checked(wins: Any) -> Array:
    """A matrix as a game; what is none is refused."""
    game = np.asarray(wins, dtype=np.float64)
    if game.ndim != 2 or game.shape[0] != game.shape[1] or len(game) < 2:
        raise PanoplyError(
            f"A game of preference is a square matrix of at least two answers, not of {game.shape}."
        )
    outside = game[~((game >= 0) & (game <= 1))]
    if outside.size:
        raise PanoplyError(f"A preference is a probability, from 0 to 1, not {outside[0]:g}.")
    if not np.allclose(game + game.T, 1, rtol=0, atol=1e-9):
        a, b = np.argwhere(~np.isclose(game + game.T, 1, rtol=0, atol=1e-9))[0]
        raise PanoplyError(
            f"Of two answers one is preferred, so two entries are 1 together: P[{a}, {b}] and P[{b}, {a}] are "
            f"{game[a, b]:g} and {game[b, a]:g}."
        )
    return game


# ------------------------------------------------------------------ measures


def uniform(game: Array) -> Array:
    return np.full(len(game), 1 / len(game))


def win_rate(game: Array, policy: Array, other: Array) -> float:
    return float(policy @ game @ other)


def exploitability(game: Array, policy: Array) -> float:
    """By how much more than half of the time the best answer against a policy wins."""
    return float((game @ policy).max() - 0.5)


def kl(p: Array, q: Array) -> float:
    """KL(p‖q) of two policies that give no answer probability 0; cancellation leaves about 1e-16 of it."""
    return float(max(0.0, (p * (np.log(p) - np.log(q))).sum()))


def regularised_nash(game: Array, reference: Array, tau: float) -> Array:
    """The fixed point of π ∝ π_ref·exp(P·π/τ), found by going a part of the way to it again and again.

    Whole steps would circle. Where the game turns by ω for each step inwards, a part of 1/(1+ω²) is best; by Pinsker's
    inequality ω is at most ½/τ.
    """
    if not tau >= LEAST_TAU:
        raise PanoplyError(
            f"The Nash policy of a regularised game is found for a tau from {LEAST_TAU:g} on, not {tau:g}."
        )
    part, policy = 1 / (1 + 1 / (2 * tau) ** 2), reference
    for _ in range(int(100 / part)):
        ahead = np.log(reference) + game @ policy / tau - np.log(policy)
        if float(np.ptp(ahead)) < 1e-14 / tau:
            break
        policy = tilted(policy, part * ahead)
    return policy


def tilted(policy: Array, by: Array) -> Array:
    """π·exp(by), normalised."""
    logits = np.log(policy) + by
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def mixture(policy: Array, other: Array, share: float) -> Array:
    """The geometric mixture π^{1−share}·other^{share}: for whole answers what mixed logits are for tokens."""
    return tilted(policy, share * (np.log(other) - np.log(policy)))


# ------------------------------------------------------------------ updates


def multiplicative_weights(game: Array, policy: Array, *, eta: float) -> Array:
    """SPPO's step, π·exp(η·P·π). One query."""
    return tilted(policy, eta * (game @ policy))


def iterative_dpo(game: Array, policy: Array, *, beta: float) -> Array:
    """DPO on pairs of the policy's own answers, with itself as reference: π·exp(r/β). One query.

    r is the Bradley–Terry score that fits the pairs best, Σ_j π_i·π_j·(P_ij − σ(r_i − r_j)) = 0, found by Newton's
    method. Scores have an order, and preferences that go round in a circle have none.
    """
    often, score = np.outer(policy, policy), np.zeros(len(policy))
    for _ in range(50):
        said = 1 / (1 + np.exp(score[None] - score[:, None]))
        slopes = often * said * (1 - said)
        curvature = np.diag(slopes.sum(1)) - slopes
        step = np.linalg.lstsq(curvature, (often * (game - said)).sum(1), rcond=None)[0]
        size = float(np.abs(step).max())
        score = score + step * min(1.0, 2.0 / max(size, 1e-300))
        if size < 1e-12:
            break
    return tilted(policy, score / beta)


def offline_ipo(game: Array, reference: Array, data: Array, *, tau: float) -> Array:
    """What minimises IPO's loss on pairs whose answers both come from `data`: π_ref·exp(P·data/τ)."""
    return tilted(reference, game @ data / tau)


def online_ipo(
    game: Array, reference: Array, policy: Array, *, tau: float, rate: float, share: float = 0.0
) -> Array:
    """A gradient step of IPO's loss on pairs of the policy's own answers, or (share > 0) of its mixture. One query.

    The loss is ½·E_{y,y′~μ}[(ρ(y, y′) − (P[y, y′] − ½)/τ)²] with ρ(y, y′) the difference of log π/π_ref, and its
    slope by the logits 2·μ·(s − mean_μ s) with s = log π/π_ref − P·μ/τ. Where it is 0, π ∝ π_ref·exp(P·μ/τ).
    """
    sampled = mixture(policy, reference, share) if share else policy
    score = np.log(policy) - np.log(reference) - game @ sampled / tau
    return tilted(policy, -rate * 2 * sampled * (score - sampled @ score))


def nash_md(game: Array, reference: Array, policy: Array, *, tau: float, eta: float) -> Array:
    """A mirror step from the mixture with ητ of the reference, and against that mixture. One query."""
    mixed = mixture(policy, reference, eta * tau)
    return tilted(mixed, eta * (game @ mixed))


def inpo(game: Array, reference: Array, policy: Array, *, tau: float, eta: float) -> Array:
    """exp(P·π/η)·π_ref^{τ/η}·π^{1−τ/η}, with η the inverse of a step size. One query."""
    return tilted(mixture(policy, reference, tau / eta), game @ policy / eta)


def proximal(
    game: Array, reference: Array, policy: Array, *, tau: float, eta: float | None = None, plays: int = 2
) -> Array:
    """The prox step against the policy; then against what came of it, from the same anchor; as often as `plays`.

        πʲ⁺¹ = argmin_q P(πʲ ≻ q)/τ + KL(q‖π_ref) + KL(q‖π)/η ∝ [exp(P·πʲ/τ)·π_ref·π^{1/η}]^{η/(1+η)},   π⁰ = π

    1 is the step without extrapolation, 2 is Nash-MP, and the more the nearer to the proximal point of Nash Prox, which
    is its own opponent. η is 2τ where nothing is said. As many queries as plays.
    """
    eta = 2 * tau if eta is None else eta
    anchor = mixture(policy, reference, eta / (1 + eta))
    opponent = policy
    for _ in range(plays):
        opponent = tilted(anchor, game @ opponent / tau * (eta / (1 + eta)))
    return opponent


# ------------------------------------------------------------------ their course


@dataclass(frozen=True)
class Course:
    """Policies one after another, the start first, and how many queries each of the steps between them took."""

    policies: Array
    queries: int = 1

    @property
    def last(self) -> Array:
        return np.asarray(self.policies[-1])

    @property
    def average(self) -> Array:
        return np.asarray(self.policies.mean(0))

    def after(self, queries: int) -> Array:
        """The policy that so many queries pay for."""
        return np.asarray(self.policies[queries // self.queries])


def course(update: Update, start: Array, steps: int, queries: int = 1) -> Course:
    def walk() -> Iterator[Array]:
        policy = start
        yield policy
        for _ in range(steps):
            policy = update(policy)
            yield policy

    return Course(np.stack(list(walk())), queries)
