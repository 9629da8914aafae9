"""PARL: the gradient of a reward model whose data are made by the policy that the reward makes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from panoply.errors import PanoplyError
from panoply.evaluation.bilevel import Solver, Value, hypergradient
from panoply.evidence.claims import Ahead
from panoply.registry import algorithm
from panoply.seeds import torch_rng
from panoply.worlds.control.mdp import MDP

SIDE = 5
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
CELLS, START = SIDE * SIDE, SIDE * SIDE // 2
Arm = Literal["hypergradient", "alternating"]
ARMS: tuple[Arm, ...] = ("hypergradient", "alternating")
RATES: dict[Arm, float] = {"hypergradient": 3.0, "alternating": 10.0}
"""The best of 1, 3 and 10 for each, with the best damping of 0.001, 0.01 and 0.1, on six grids of no claim."""
LABELS = (20, 50, 100, 200)
"""After how many answers of the teacher the policy is looked at."""
ROUGH = 30
"""Times the damping, where the curvature is that of a sample: it is not negative in all directions."""
GRIDS = 8
"""A measure is of so many: what is learnt of one by a few noisy labels says little."""


@dataclass(frozen=True)
class Paths:
    """Ways through the grid: where each step was taken, which move it was, and which cell it led to, [paths, steps]."""

    cell: Tensor
    move: Tensor
    to: Tensor

    def __getitem__(self, chosen: Tensor) -> Paths:
        return Paths(self.cell[chosen], self.move[chosen], self.to[chosen])

    def log_chances(self, theta: Tensor) -> Tensor:
        """log π_θ of every step, [paths, steps]."""
        steps = torch.arange(self.cell.shape[1]).expand_as(self.cell)
        return theta.log_softmax(-1)[steps, self.cell, self.move]

    def returns(self, reward: Tensor) -> Tensor:
        """R = Σ_h r(s_h), undiscounted: what pairs are compared by."""
        return reward[self.to].sum(-1)


@dataclass(frozen=True)
class Grid:
    """5 × 5 cells, `horizon` moves from the middle one; a cell's reward is for reaching it, walls hold one in place.

    The policy is a softmax over moves for every time and cell, θ[h, s, a], and V(ν, θ) = E Σ_h γ^h (r_ν + λ·entropy).
    """

    horizon: int = 4
    gamma: float = 0.95
    entropy: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.horizon <= 6:
            raise PanoplyError(
                f"horizon is from 1 to 6, since all 4^horizon paths are listed, not {self.horizon}."
            )
        if not 0 < self.gamma <= 1:
            raise PanoplyError(f"gamma is above 0 and at most 1, not {self.gamma:g}.")
        if not self.entropy > 0:
            raise PanoplyError(
                f"entropy is above 0, not {self.entropy:g}: without it the best policy jumps from move to move "
                "as the reward changes, and has no derivative."
            )

    @cached_property
    def after(self) -> Tensor:
        """The cell that a move leads to, [cells, moves]."""
        cell, moves = torch.arange(CELLS)[:, None], torch.tensor(MOVES)
        row, column = (cell // SIDE + moves[:, 0], cell % SIDE + moves[:, 1])
        return row.clamp(0, SIDE - 1) * SIDE + column.clamp(0, SIDE - 1)

    @cached_property
    def every_path(self) -> Paths:
        """All 4^horizon ways through the grid."""
        move = torch.tensor(list(product(range(len(MOVES)), repeat=self.horizon)))
        cells = [torch.full((len(move),), START)]
        for h in range(self.horizon):
            cells.append(self.after[cells[-1], move[:, h]])
        return Paths(torch.stack(cells[:-1], 1), move, torch.stack(cells[1:], 1))

    def chances(self, theta: Tensor) -> Tensor:
        """ρ(τ; θ) of every path."""
        return self.every_path.log_chances(theta).sum(-1).exp()

    def solve(self, nu: Tensor) -> Tensor:
        """θ*(ν) exactly, by soft backward induction: θ = Q/λ, V = λ·log Σ_a e^{Q/λ}."""
        worth, stages = torch.zeros(CELLS, dtype=nu.dtype), []
        for _ in range(self.horizon):
            q = (nu + self.gamma * worth)[self.after] / self.entropy
            stages.append(q.log_softmax(-1))
            worth = self.entropy * q.logsumexp(-1)
        return torch.stack(stages[::-1])

    def value(self, nu: Tensor, theta: Tensor) -> Tensor:
        """V(ν, θ), exactly."""
        worth = torch.zeros(CELLS, dtype=nu.dtype)
        for logp in theta.log_softmax(-1).flip(0):
            worth = (logp.exp() * ((nu + self.gamma * worth)[self.after] - self.entropy * logp)).sum(-1)
        return worth[START]

    def sampled_value(self, played: Paths, weight: Tensor, outer_products: bool = True) -> Value:
        """V(ν, θ) as a mean over paths whose derivatives at the θ that played them estimate those of V, unbiased.

        Paths that were drawn are constants, so a plain mean lacks how θ moves them. Each step's reward is therefore
        multiplied by e^{L_h − sg(L_h)}, L_h = Σ_{j≤h} log π(a_j|s_j): 1, with the score as derivative and the score's
        outer products as second. Without those the curvature is E Σ_h γ^h r_h Σ_{j≤h} ∇²log π(a_j|s_j).
        """
        discount = self.gamma ** torch.arange(self.horizon, dtype=weight.dtype)

        def value(nu: Tensor, theta: Tensor) -> Tensor:
            logp = played.log_chances(theta)
            so_far = logp.cumsum(-1)
            if outer_products:
                gain, scored = nu[played.to] - self.entropy * logp, (so_far - so_far.detach()).exp()
            else:
                gain, scored = nu[played.to] - self.entropy * logp.detach(), so_far
            return (weight[:, None] * discount * gain * scored).sum()

        return value

    def share(self, theta: Tensor, truth: Tensor) -> float:
        """The true return, where 0 is acting at random and 1 the best policy of V for the true reward."""
        of = (theta, torch.zeros_like(theta), self.solve(truth))
        found, least, best = (self.true_return(policy, truth) for policy in of)
        return (found - least) / (best - least)

    def true_return(self, theta: Tensor, truth: Tensor) -> float:
        """What the policy really earns: the expected sum of true rewards."""
        moves = np.eye(CELLS)[self.after.numpy()]
        rewards = np.broadcast_to(truth.numpy(), moves.shape)
        mdp = MDP(moves, rewards, np.eye(CELLS)[START], np.zeros(CELLS, bool))
        return mdp.value(theta.softmax(-1).numpy(), 1.0, self.horizon)


# ------------------------------------------------------------------ the upper problem


def likelihood(margin: Tensor, prefers: Tensor) -> Tensor:
    """U = y·log σ(R₀ − R₁) + (1 − y)·log σ(R₁ − R₀), y a label or its probability."""
    return prefers * logsigmoid(margin) + (1 - prefers) * logsigmoid(-margin)


def margins(paths: Paths, reward: Tensor) -> Tensor:
    """R(τ₀) − R(τ₁) of every path with every other, [paths, paths]."""
    returns = paths.returns(reward)
    return returns[:, None] - returns


def exact_upper(grid: Grid, nu: Tensor, theta: Tensor, truth: Tensor, decay: float = 0.0) -> Tensor:
    """G(ν, θ), over all pairs of paths and both answers of a Bradley–Terry teacher, less ½·decay·‖ν‖²."""
    paths, chance = grid.every_path, grid.chances(theta)
    found = likelihood(margins(paths, nu), margins(paths, truth).sigmoid())
    return chance @ found @ chance - decay / 2 * (nu**2).sum()


def leave_one_out(u: Tensor) -> Tensor:
    """For each pair the mean likelihood of the others: a baseline that does not depend on the pair."""
    return (u.sum() - u) / (len(u) - 1)


def sampled_upper(
    nu: Tensor, theta: Tensor, first: Paths, second: Paths, prefers: Tensor, decay: float = 0.0
) -> tuple[Tensor, Tensor]:
    """∂_ν G and ∂_θ G, estimated from labelled pairs that θ has played.

    ∂_θ G = E[(U − b)·Σ_h (∇log π(a⁰_h|s⁰_h) + ∇log π(a¹_h|s¹_h))]: a score-function term of the likelihood itself. U is
    never above 0, so without the baseline b every pair would be pushed away.
    """
    nu, theta = nu.detach().requires_grad_(), theta.detach().requires_grad_()
    u = likelihood(first.returns(nu) - second.returns(nu), prefers)
    (by_nu,) = torch.autograd.grad(u.mean() - decay / 2 * (nu**2).sum(), nu)
    ahead = u.detach() - leave_one_out(u.detach())
    score = (first.log_chances(theta) + second.log_chances(theta)).sum(-1)
    (by_theta,) = torch.autograd.grad((ahead * score).mean(), theta)
    return by_nu, by_theta


def finite_differences(
    grid: Grid, nu: Tensor, truth: Tensor, decay: float = 0.0, step: float = 1e-5
) -> Tensor:
    """dG/dν without any formula: the reward is moved, the policy solved anew, and G looked at."""

    def upper(moved: Tensor) -> Tensor:
        return exact_upper(grid, moved, grid.solve(moved), truth, decay)

    ways = step * torch.eye(CELLS, dtype=nu.dtype)
    return torch.stack([(upper(nu + way) - upper(nu - way)) / (2 * step) for way in ways])


def exact_partials(
    grid: Grid, nu: Tensor, theta: Tensor, truth: Tensor, decay: float = 0.0
) -> tuple[Tensor, Tensor]:
    """∂_ν G and ∂_θ G over all pairs."""
    nu, theta = nu.detach().requires_grad_(), theta.detach().requires_grad_()
    by_nu, by_theta = torch.autograd.grad(exact_upper(grid, nu, theta, truth, decay), (nu, theta))
    return by_nu, by_theta


# ------------------------------------------------------------------ what is measured


def drawn_rewards(seed: int) -> tuple[Tensor, Tensor]:
    """A true reward and another one to begin with, each cell's from a standard normal."""
    dice = torch_rng("parl", seed)
    truth, nu = torch.randn(2, CELLS, generator=dice, dtype=torch.float64)
    return truth, nu


def gradients(
    seed: int,
    grid: Grid | None = None,
    *,
    pairs: int = 200,
    paths: int = 2000,
    damping: float = 1e-3,
    decay: float = 0.0,
) -> dict[str, Tensor]:
    """dG/dν at a random reward, by finite differences and by each way of computing or estimating it."""
    grid = grid or Grid()
    truth, nu = drawn_rewards(seed)
    theta, dice = grid.solve(nu), torch_rng("parl pairs", seed)
    exact = exact_partials(grid, nu, theta, truth, decay)
    labelled = sampled_upper(nu, theta, *played_pairs(grid, theta, truth, pairs, dice), decay=decay)
    chance = grid.chances(theta)
    flat = grid.sampled_value(grid.every_path, chance, outer_products=False)
    drawn = grid.every_path[torch.multinomial(chance, paths, replacement=True, generator=dice)]
    seen = grid.sampled_value(drawn, torch.full((paths,), 1 / paths, dtype=nu.dtype))
    solver: Solver = "conjugate gradient"
    return {
        "finite differences": finite_differences(grid, nu, truth, decay),
        "exact": hypergradient(grid.value, nu, theta, *exact),
        "conjugate gradient": hypergradient(grid.value, nu, theta, *exact, solver, damping),
        "diagonal curvature": hypergradient(grid.value, nu, theta, *exact, "diagonal", damping),
        "no outer products": hypergradient(flat, nu, theta, *exact, solver, damping),
        "alternating": exact[0],
        "labelled pairs": hypergradient(grid.value, nu, theta, *labelled, solver, damping),
        "pairs and paths": hypergradient(seen, nu, theta, *labelled, solver, ROUGH * damping),
        "pairs, alternating": labelled[0],
    }


def played_pairs(
    grid: Grid, theta: Tensor, truth: Tensor, pairs: int, dice: torch.Generator
) -> tuple[Paths, Paths, Tensor]:
    """Pairs of paths that the policy takes, and which of the two a Bradley–Terry teacher prefers."""
    paths, chance = grid.every_path, grid.chances(theta)
    drawn = torch.multinomial(chance, 2 * pairs, replacement=True, generator=dice)
    first, second = paths[drawn[:pairs]], paths[drawn[pairs:]]
    ahead = (first.returns(truth) - second.returns(truth)).sigmoid()
    return first, second, (torch.rand(pairs, generator=dice, dtype=ahead.dtype) < ahead).to(ahead)


def learn(
    seed: int,
    arm: Arm,
    grid: Grid | None = None,
    *,
    labels: int = LABELS[-1],
    pairs: int = 10,
    lr: float | None = None,
    damping: float = 0.1,
    decay: float = 0.0,
    inner: int = 0,
    inner_lr: float = 1.0,
) -> dict[int, float]:
    """The true return after so many labels, as a share (`Grid.share`).

    Each round solves the lower problem (`inner` = 0), or takes so many steps of ascent on it from where it is; plays
    `pairs` new pairs, which the teacher labels; and moves ν once.
    """
    grid, lr = grid or Grid(), RATES[arm] if lr is None else lr
    truth, _ = drawn_rewards(seed)
    dice = torch_rng("parl labels", seed)
    nu = torch.zeros(CELLS, dtype=torch.float64)
    theta = torch.zeros(grid.horizon, CELLS, len(MOVES), dtype=torch.float64)
    found = {}
    for done in range(0, labels + 1, pairs):
        theta = improved(grid, nu, theta, inner, inner_lr)
        found[done] = grid.share(theta, truth)
        played = played_pairs(grid, theta, truth, pairs, dice)
        by_nu, by_theta = sampled_upper(nu, theta, *played, decay=decay)
        if arm == "hypergradient":
            by_nu = hypergradient(grid.value, nu, theta, by_nu, by_theta, "conjugate gradient", damping)
        nu = nu + lr * by_nu
    return found


def improved(grid: Grid, nu: Tensor, theta: Tensor, inner: int, lr: float) -> Tensor:
    """θ after so many steps of gradient ascent on V(ν, ·), or its maximum where `inner` is 0."""
    if not inner:
        return grid.solve(nu)
    for _ in range(inner):
        theta = theta.detach().requires_grad_()
        (slope,) = torch.autograd.grad(grid.value(nu, theta), theta)
        theta = (theta + lr * slope).detach()
    return theta


def direction(seed: int, grid: Grid | None = None) -> dict[str, float]:
    """How much nearer to the direction of finite differences the hypergradient is than reward fitting alone."""
    table = compared(gradients(seed, grid))
    cosines = {name: row["cosine"] for name, row in table.items()}
    return {"nearer": cosines["exact"] - cosines["alternating"], **cosines}


def compared(found: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Each gradient's cosine with finite differences, and its length in units of theirs."""
    true = found["finite differences"]
    return {
        name: {
            "cosine": float(of @ true / (of.norm() * true.norm())),
            "length": float(of.norm() / true.norm()),
        }
        for name, of in found.items()
    }


def returns(seed: int, grids: int = GRIDS, **settings: Any) -> dict[Arm, dict[int, float]]:
    """The true return by the number of labels, of both arms, on the same grids."""
    numbers = range(grids * seed, grids * (seed + 1))
    found: dict[Arm, dict[int, float]] = {}
    for arm in ARMS:
        curves = [learn(number, arm, **settings) for number in numbers]
        found[arm] = {done: sum(curve[done] for curve in curves) / grids for done in curves[0]}
    return found


def per_label(seed: int) -> dict[str, float]:
    """By how much the true return is higher along the hypergradient, on the mean of 20 to 200 labels."""
    curves = returns(seed)
    means = {arm: sum(v for n, v in of.items() if n >= LABELS[0]) for arm, of in curves.items()}
    count = sum(n >= LABELS[0] for n in curves["alternating"])
    each = {f"{arm} at {n}": curves[arm][n] for arm in ARMS for n in LABELS}
    return {"ahead": (means["hypergradient"] - means["alternating"]) / count, **each}


CLAIM = Ahead(
    "The gradient that goes through the policy has the direction of finite differences of the whole bilevel objective; "
    "that of fitting the reward to labels alone has another.",
    direction,
)
PER_LABEL = Ahead(
    "With as many labels, a reward that is moved along the hypergradient makes a policy with a higher true return than "
    "one that is moved by the likelihood of the labels alone, on the mean of 20 to 200 labels.",
    per_label,
)


@algorithm("parl@1", paper=121, claim=CLAIM, tags=("exact",))
def parl(
    horizon: int = 4,
    gamma: float = 0.95,
    entropy: float = 0.5,
    pairs: int = 200,
    paths: int = 2000,
    damping: float = 1e-3,
    decay: float = 0.0,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """PARL (arXiv 2308.02585): fitting a reward to labels on what the reward's own policy does is a bilevel problem.

    Above, the reward ν is to explain a teacher's choices between pairs of paths, G(ν, θ) = E[log-likelihood]; below,
    θ*(ν) maximises V(ν, ·) and plays those pairs. Moving ν moves the pairs, so

        dG/dν = ∂_ν G − ∇²_νθ V·[∇²_θθ V]⁻¹·∂_θ G,

    where earlier methods alternate between the two problems, with ∂_ν G alone. The table holds each way of computing it
    against finite differences, on a 5 × 5 grid that is solved exactly: by inverting the curvature, by conjugate
    gradients, with its diagonal, and without the outer products of scores; then from labelled pairs, with V known or
    estimated from a sample of paths.

    Surprising: at the true reward ∂_ν G is 0 and dG/dν is not. The policy can still make its pairs easier to judge, so
    the best reward of the bilevel problem is not the true one; `parl-labels` measures what becomes of the true return.
    No code is released, and the estimators of the curvature are reconstructed. Not there: the paper's version for deep
    networks (on SAC, by a first-order surrogate) and its robots.
    """
    if pairs < 2 or paths < 1:
        raise PanoplyError(f"pairs is at least 2 and paths at least 1, not {pairs} and {paths}.")
    _check(damping, decay)
    grid = Grid(horizon, gamma, entropy)
    return compared(gradients(seed, grid, pairs=pairs, paths=paths, damping=damping, decay=decay))


@algorithm("parl-labels@1", paper=121, claim=PER_LABEL, tags=("exact",))
def parl_labels(
    horizon: int = 4,
    gamma: float = 0.95,
    entropy: float = 0.5,
    pairs: int = 10,
    lr: float | None = None,
    damping: float = 0.1,
    decay: float = 0.0,
    inner: int = 0,
    inner_lr: float = 1.0,
    grids: int = GRIDS,
    seed: int = 0,
) -> dict[str, dict[str, float]]:
    """A-PARL (arXiv 2308.02585): the true return by the number of labels, along the hypergradient and without.

    Each round takes `inner` steps of ascent on V from where the policy is (with 0 it is solved), plays `pairs` pairs
    that a Bradley–Terry teacher labels, and moves ν once by `lr` times the gradient that `parl` is about; without `lr`
    each arm has the rate that is best for it. 0 is acting at random, 1 the best policy of V for the true reward; means
    over `grids` grids, whose rewards are drawn.
    """
    if pairs < 2 or any(n % pairs for n in LABELS):
        raise PanoplyError(
            f"pairs is 2, 5 or 10, which {', '.join(map(str, LABELS))} are multiples of, not {pairs}."
        )
    if grids < 1 or inner < 0 or (lr is not None and not lr > 0) or not inner_lr > 0:
        raise PanoplyError("grids is at least 1, inner at least 0, and lr and inner_lr are above 0.")
    if not inner and inner_lr != 1.0:
        raise PanoplyError("inner_lr has no effect while inner is 0 and the policy is solved exactly.")
    _check(damping, decay)
    of = {"pairs": pairs, "lr": lr, "damping": damping, "decay": decay, "inner": inner, "inner_lr": inner_lr}
    curves = returns(seed, grids, grid=Grid(horizon, gamma, entropy), **of)
    return {arm: {f"{n} labels": curve[n] for n in LABELS} for arm, curve in curves.items()}


def _check(damping: float, decay: float) -> None:
    if not damping > 0:
        raise PanoplyError(
            f"damping is above 0, not {damping:g}: a softmax does not change when all logits do, so its curvature "
            "cannot be inverted there."
        )
    if decay < 0:
        raise PanoplyError(f"decay is at least 0, not {decay:g}.")
