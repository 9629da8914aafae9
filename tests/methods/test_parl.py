"""PARL: the gradient through the policy, against finite differences, closed forms and the estimators' own sums."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.evaluation.bilevel import hypergradient
from panoply.methods.preferences.parl import (
    CELLS,
    START,
    Grid,
    direction,
    drawn_rewards,
    exact_partials,
    finite_differences,
    gradients,
    improved,
    learn,
    leave_one_out,
    likelihood,
    parl,
    parl_labels,
    played_pairs,
    sampled_upper,
)
from panoply.seeds import torch_rng
from panoply.slots.update.natural import conjugate

GRID = Grid(horizon=2)


def some(seed: int = 1001) -> tuple[Tensor, Tensor, Tensor]:
    truth, nu = drawn_rewards(seed)
    return truth, nu, GRID.solve(nu)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_hypergradient_is_that_of_finite_differences_and_the_sign_is_a_minus(decay: float) -> None:
    truth, nu, theta = some()
    by_nu, by_theta = exact_partials(GRID, nu, theta, truth, decay)
    true = finite_differences(GRID, nu, truth, decay)
    found = hypergradient(GRID.value, nu, theta, by_nu, by_theta)
    torch.testing.assert_close(found, true, rtol=0, atol=1e-8)
    flipped = 2 * by_nu - found
    assert (flipped - true).norm() > 0.1 * true.norm()
    solved = hypergradient(GRID.value, nu, theta, by_nu, by_theta, "conjugate gradient", 1e-9)
    torch.testing.assert_close(solved, true, rtol=0, atol=1e-5)


def test_at_the_true_reward_labels_are_explained_and_the_bilevel_objective_still_rises() -> None:
    truth, _, _ = some()
    theta = GRID.solve(truth)
    by_nu, by_theta = exact_partials(GRID, truth, theta, truth)
    assert by_nu.norm() < 1e-12
    assert hypergradient(GRID.value, truth, theta, by_nu, by_theta).norm() > 0.01


def test_the_grid() -> None:
    after = GRID.after.view(5, 5, 4)
    assert after[2, 2].tolist() == [7, 17, 11, 13]  # up, down, left, right of the middle
    assert after[0, 0].tolist() == [0, 5, 0, 1]  # walls
    assert after[4, 4].tolist() == [19, 24, 23, 24]
    paths = GRID.every_path
    assert len(paths.cell) == 16
    assert paths.cell[:, 0].eq(START).all()
    assert paths.to[6].tolist() == [17, 16]  # down, left
    reward = torch.arange(CELLS, dtype=torch.float64)
    assert paths.returns(reward)[6] == 33
    assert float(GRID.chances(GRID.solve(reward)).sum()) == pytest.approx(1)
    always_down = torch.zeros(2, CELLS, 4, dtype=torch.float64)
    always_down[..., 1] = 50
    assert GRID.true_return(always_down, reward) == pytest.approx(17 + 22)
    assert [GRID.share(of, reward) for of in (0 * always_down, GRID.solve(reward))] == pytest.approx([0, 1])
    assert GRID.share(always_down, reward) > 1, "the best of V also keeps its entropy"
    assert float(GRID.value(reward, always_down)) == pytest.approx(17 + 0.95 * 22)


def test_the_lower_problem_is_solved_and_its_curvature_is_known() -> None:
    """∇V = 0, and ∇²V is block by block −λ·γ^h·d_h(s)·(diag π − π·πᵀ): singular where all logits of a cell rise."""
    _, nu, theta = some()
    at = theta.clone().requires_grad_()
    (slope,) = torch.autograd.grad(GRID.value(nu, at), at)
    assert slope.abs().max() < 1e-12
    assert float(GRID.value(nu, theta)) > float(GRID.value(nu, theta + torch.randn_like(theta) / 10))
    found = torch.autograd.functional.hessian(lambda t: GRID.value(nu, t), theta).view(200, 200)
    paths, chance = GRID.every_path, GRID.chances(theta)
    wanted = torch.zeros(2, CELLS, 4, 2, CELLS, 4, dtype=torch.float64)
    for h in range(2):
        for cell in range(CELLS):
            pi = theta[h, cell].softmax(-1)
            visits = chance[paths.cell[:, h] == cell].sum()
            wanted[h, cell, :, h, cell] = -0.5 * 0.95**h * visits * (pi.diag() - torch.outer(pi, pi))
    torch.testing.assert_close(found, wanted.view(200, 200), rtol=0, atol=1e-12)
    assert (found.view(-1, 50, 4).sum(-1)).abs().max() < 1e-12


def test_estimators_over_all_paths_are_the_derivatives() -> None:
    """A sample that has every path as often as it occurs has no error left: sums of scores are then exact."""
    _, nu, _ = some()
    theta = 0.3 * torch.randn(2, CELLS, 4, generator=torch_rng("theta"), dtype=torch.float64)  # no optimum
    chance, paths = GRID.chances(theta), GRID.every_path
    seen = GRID.sampled_value(paths, chance)
    for value in (GRID.value, seen):
        assert value(nu, theta) == pytest.approx(float(GRID.value(nu, theta)))
    by = torch.autograd.functional
    exact, found = (by.hessian(value, (nu, theta)) for value in (GRID.value, seen))
    for i in range(2):
        for j in range(2):
            torch.testing.assert_close(found[i][j], exact[i][j], rtol=0, atol=1e-12)
    slopes = [by.jacobian(value, (nu, theta)) for value in (GRID.value, seen)]
    torch.testing.assert_close(slopes[1], slopes[0], rtol=0, atol=1e-12)
    # the cross term, as a sum of scores: E Σ_h γ^h ∇_ν r_h (Σ_{j≤h} ∇log π_j)ᵀ
    wanted = torch.zeros(CELLS, theta.numel(), dtype=torch.float64)
    scores = by.jacobian(paths.log_chances, theta).view(16, 2, -1)
    for path in range(16):
        for h in range(2):
            wanted[paths.to[path, h]] += chance[path] * 0.95**h * scores[path, : h + 1].sum(0)
    torch.testing.assert_close(found[0][1].view(CELLS, -1), wanted, rtol=0, atol=1e-12)


def test_without_outer_products_the_curvature_is_that_of_log_chances_weighted_by_rewards() -> None:
    _, nu, theta = some()
    chance, paths = GRID.chances(theta), GRID.every_path
    flat = GRID.sampled_value(paths, chance, outer_products=False)
    found = torch.autograd.functional.hessian(lambda t: flat(nu, t), theta).view(50, 4, 50, 4)
    logp = paths.log_chances(theta)
    wanted = torch.zeros_like(found)
    for path in range(16):
        for h in range(2):
            gain = 0.95**h * (nu[paths.to[path, h]] - 0.5 * logp[path, h])
            for j in range(h + 1):
                row = j * CELLS + int(paths.cell[path, j])
                pi = theta.view(50, 4)[row].softmax(-1)
                wanted[row, :, row] -= chance[path] * gain * (pi.diag() - torch.outer(pi, pi))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_labelled_pairs_estimate_both_partial_derivatives() -> None:
    """Where all paths are as likely, all pairs of them are a sample without error but for the baseline's n/(n − 1)."""
    truth, nu, _ = some()
    theta = torch.zeros(2, CELLS, 4, dtype=torch.float64)
    every = torch.cartesian_prod(torch.arange(16), torch.arange(16))
    first, second = (GRID.every_path[every[:, i]] for i in range(2))
    prefers = (first.returns(truth) - second.returns(truth)).sigmoid()
    found = sampled_upper(nu, theta, first, second, prefers, decay=0.2)
    exact = exact_partials(GRID, nu, theta, truth, decay=0.2)
    torch.testing.assert_close(found[0], exact[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1] * 255 / 256, exact[1], rtol=0, atol=1e-12)


def test_likelihood_baseline_and_teacher() -> None:
    u = likelihood(torch.tensor([0.0, 2.0, 2.0]), torch.tensor([1.0, 1.0, 0.0]))
    assert u.tolist() == pytest.approx([-math.log(2), -math.log1p(math.exp(-2)), -math.log1p(math.exp(2))])
    assert leave_one_out(torch.tensor([1.0, 2.0, 6.0])).tolist() == [4.0, 3.5, 1.5]
    truth, _, theta = some()
    first, second, prefers = played_pairs(GRID, theta, truth, 4000, torch_rng("labels"))
    ahead = (first.returns(truth) - second.returns(truth)).sigmoid()
    assert prefers.unique().tolist() == [0, 1]
    assert float((prefers * ahead + (1 - prefers) * (1 - ahead)).mean()) == pytest.approx(
        float((ahead**2 + (1 - ahead) ** 2).mean()), abs=0.02
    )
    assert float((prefers - ahead).mean()) == pytest.approx(0, abs=0.02)
    often = torch.bincount(first.to[:, 0], minlength=CELLS) / 4000
    torch.testing.assert_close(often[GRID.after[START]].double(), theta[0, START].exp(), rtol=0, atol=0.03)


def test_steps_of_ascent_come_to_the_solution_from_where_the_policy_is() -> None:
    _, nu, solved = some()
    uniform = torch.zeros_like(solved)
    one = improved(GRID, nu, uniform, 1, 0.5)
    wanted = torch.autograd.functional.jacobian(lambda t: GRID.value(nu, t), uniform)
    torch.testing.assert_close(one, 0.5 * wanted)
    near = improved(GRID, nu, solved + 0.1 * torch.randn_like(solved), 60, 4.0)
    torch.testing.assert_close(GRID.value(nu, near), GRID.value(nu, solved), rtol=0, atol=1e-4)
    assert improved(GRID, nu, uniform, 0, 1.0).equal(solved)


def test_learning_counts_labels_and_differs_by_the_implicit_term_alone() -> None:
    ways = {arm: learn(1001, arm, GRID, labels=20, lr=3.0) for arm in ("hypergradient", "alternating")}
    for found in ways.values():
        assert list(found) == [0, 10, 20]
        assert found[0] == pytest.approx(0)
    assert ways["hypergradient"][10] == ways["alternating"][10]  # at ν = 0 all pairs are alike
    assert ways["hypergradient"][20] != ways["alternating"][20]
    stiff = learn(1001, "hypergradient", GRID, labels=20, lr=3.0, damping=1e12)
    assert stiff == pytest.approx(ways["alternating"], abs=1e-6)
    assert learn(1001, "alternating", GRID, labels=20, lr=3.0) == ways["alternating"]
    by_steps = learn(1001, "alternating", GRID, labels=20, lr=3.0, inner=50, inner_lr=2.0)
    assert by_steps == pytest.approx(ways["alternating"], abs=0.05)


def test_conjugate_gradients_stop_where_the_product_is_not_positive() -> None:
    matrix = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    wanted = torch.tensor([1.0, -1.0])
    torch.testing.assert_close(conjugate(matrix.mv, wanted, 5), torch.linalg.solve(matrix, wanted))
    assert conjugate(lambda v: -v, wanted, 5).tolist() == [0, 0]
    assert conjugate(matrix.mv, torch.zeros(2), 5).tolist() == [0, 0]


def test_what_is_printed_and_refused() -> None:
    table = parl(horizon=1, pairs=50, paths=300, seed=1001)
    assert table["exact"]["cosine"] == pytest.approx(1)
    assert table["exact"]["length"] == pytest.approx(1, abs=1e-6)
    assert table["alternating"]["cosine"] < 0.99
    assert table["alternating"] != table["pairs, alternating"]
    assert set(table) == set(gradients(1001, Grid(horizon=1), pairs=2, paths=2))
    for settings, said in (
        ({"entropy": 0.0}, "entropy is above 0"),
        ({"damping": 0.0}, "damping is above 0"),
        ({"horizon": 9}, "horizon is from 1 to 6"),
        ({"gamma": 1.5}, "gamma is above 0"),
        ({"pairs": 1}, "pairs is at least 2"),
        ({"decay": -1.0}, "decay is at least 0"),
    ):
        with pytest.raises(PanoplyError, match=said):
            parl(**settings)  # type: ignore[arg-type]
    for settings, said in (
        ({"pairs": 7}, "pairs is 2, 5 or 10"),
        ({"inner_lr": 0.5}, "inner_lr has no effect"),
        ({"lr": 0.0}, "lr and inner_lr are above 0"),
        ({"damping": 0.0}, "damping is above 0"),
    ):
        with pytest.raises(PanoplyError, match=said):
            parl_labels(**settings)  # type: ignore[arg-type]


def test_what_the_claim_measures() -> None:
    found = direction(1002, Grid(horizon=1))
    assert found["exact"] == pytest.approx(1)
    assert found["nearer"] == pytest.approx(1 - found["alternating"])
    assert found["nearer"] > 0.05
