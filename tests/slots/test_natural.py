"""The natural gradient: Fisher products and conjugate gradients against dense linear algebra; TRPO's promise."""

from __future__ import annotations

import pytest
import torch

from panoply.slots.update.natural import Natural, conjugate, fisher


def test_fisher_products_are_those_of_the_dense_matrix() -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 4).double()
    x, action = torch.randn(20, 3).double(), torch.randint(4, (20,))
    logp = net(x).log_softmax(-1)[torch.arange(20), action]
    leaves = list(net.parameters())
    rows = [torch.cat([g.flatten() for g in torch.autograd.grad(p, leaves, retain_graph=True)]) for p in logp]
    dense = torch.stack(rows).T @ torch.stack(rows) / 20 + 0.1 * torch.eye(16).double()
    v = torch.randn(16).double()
    product = fisher(logp, leaves, 0.1)  # type: ignore[arg-type]
    torch.testing.assert_close(product(v), dense @ v)
    torch.testing.assert_close(conjugate(product, v, 40), torch.linalg.solve(dense, v), atol=1e-5, rtol=1e-4)


class Quadratic:
    """log π = θ·x; the judge says what is told."""

    def __init__(self, weight: torch.nn.Parameter, verdicts: list[tuple[float, float]]):
        self.leaves, self.weight, self.verdicts = [weight], weight, iter(verdicts)

    def logp(self) -> torch.Tensor:
        return torch.tensor([[2.0, 0.0], [0.0, 1.0]]) @ self.weight

    def judge(self) -> tuple[float, float]:
        return next(self.verdicts)


def step(search: int, verdicts: list[tuple[float, float]]) -> list[float]:
    """F = diag(2, ½) and g = (2, 1), so F⁻¹g = (1, 2), whose length in F is 4: the stride is √(2δ/4) = ½ for δ = ½."""
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([2.0, 1.0])
    settings = {"lr": 1.0, "delta": 0.5, "damping": 0.0, "iterations": 10, "search": search, "shrink": 0.5}
    Natural([weight], **settings).step(Quadratic(weight, verdicts))
    found: list[float] = weight.tolist()
    return found


def test_the_stride_by_hand() -> None:
    assert step(0, []) == pytest.approx([-0.5, -1.0])


def test_the_search_shortens_until_loss_and_kl_agree() -> None:
    """Before: loss 1. Full step: too far. Half: no better. A quarter: taken."""
    assert step(5, [(1.0, 0), (0.5, 0.6), (1.1, 0.1), (0.9, 0.1)]) == pytest.approx([-0.125, -0.25])


def test_without_a_good_step_the_weights_stay() -> None:
    assert step(2, [(1.0, 0), (1.1, 0.1), (1.1, 0.1)]) == [0.0, 0.0]
