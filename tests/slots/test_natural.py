"""The natural gradient: Fisher products and conjugate gradients against dense linear algebra; TRPO's promise."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from panoply.experience import Experience, Table
from panoply.loops.learner import Learner
from panoply.methods.base.trpo import trpo
from panoply.policies.control import ControlPolicy, PolicySpec
from panoply.slots.update.natural import Natural, conjugate, fisher
from panoply.worlds.control.world import Box, Discrete, MultiDiscrete


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

    def judge(self, before: torch.Tensor | None = None) -> tuple[float, float]:
        return next(self.verdicts)


def step(search: int, verdicts: list[tuple[float, float]]) -> list[float]:
    """F = diag(2, ½) and g = (2, 1), so F⁻¹g = (1, 2), whose length in F is 4: the stride is √(2δ/4) = ½ for δ = ½."""
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([2.0, 1.0])
    settings = {
        "lr": 1.0,
        "delta": 0.5,
        "damping": 0.0,
        "iterations": 10,
        "search": search,
        "shrink": 0.5,
        "fisher": "sampled",
    }
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


# ------------------------------------------------------------------ of whole distributions

SPACES = {
    "choice": (Discrete(3), PolicySpec(hidden=(4,))),
    "choices": (MultiDiscrete((2, 3)), PolicySpec(hidden=(4,))),
    "normal": (Box((2,)), PolicySpec(hidden=(4,), log_std=-0.5)),
    "squashed": (Box((2,), (-1.0, -1.0), (1.0, 1.0)), PolicySpec(hidden=(4,), squash=True, std="state")),
}


@pytest.mark.parametrize("kind", SPACES)
def test_the_exact_fisher_matrix_is_the_curvature_of_the_kl(kind: str) -> None:
    """The second derivative of mean KL(π_then‖π) at π_then, by torch's own Hessian in float64."""
    space, spec = SPACES[kind]
    policy = ControlPolicy.fresh(Box((3,)), space, spec, seed=1)
    model = policy.model.double()
    model.features.forward = lambda x: x  # type: ignore[method-assign]
    with torch.no_grad():
        model.layers.layers[-1].weight.mul_(50)  # type: ignore[union-attr, operator]
    seen = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    named = dict(model.named_parameters())
    sizes = [p.numel() for p in named.values()]
    then = policy.head.distribution(model(seen), None, None).detach()

    def kl(flat: torch.Tensor) -> torch.Tensor:
        pieces = [x.view_as(p) for x, p in zip(flat.split(sizes), named.values(), strict=True)]
        given = dict(zip(named, pieces, strict=True))
        first, second = (
            (given[f"layers.layers.{i}.weight"], given[f"layers.layers.{i}.bias"]) for i in (0, 1)
        )
        out = torch.nn.functional.linear(torch.nn.functional.linear(seen, *first).tanh(), *second)
        if not spec.squash and isinstance(space, Box):  # the head's own parameter is not the network's output
            distribution = torch.cat([out, given["head.log_std"].expand_as(out)], -1)
        else:
            distribution = policy.head.distribution(out, None, None)
        return policy.head.divergence(then, distribution, 1.0).mean()

    start = torch.cat([p.detach().flatten() for p in named.values()])
    dense = torch.autograd.functional.hessian(kl, start)
    distribution = policy.head.distribution(model(seen), None, None)
    product = fisher(
        distribution, list(named.values()), 0.1, partial(policy.head.curved, distribution.detach())
    )  # type: ignore[arg-type]
    v = torch.randn(len(start), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert dense.abs().max() > 1e-2
    torch.testing.assert_close(product(v), dense @ v + 0.1 * v)


def test_trpo_judges_by_the_kl_of_whole_distributions() -> None:
    """KL(then‖now), over all actions and in that direction, of a policy whose last offset has moved."""
    policy = ControlPolicy.fresh(Box((2,)), Discrete(3), PolicySpec(hidden=(4,)), seed=1)
    seen = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    columns: dict[str, Any] = {"context": torch.arange(6), "action": torch.zeros(6, dtype=torch.long)}
    columns |= {"advantage": torch.ones(6), "episode": torch.arange(6)}
    rows = Experience(Table(columns), Table({"observation": seen}))
    with torch.no_grad():
        rows = rows.with_columns(logp=policy.score(rows)["logp"])
    learner = Learner(policy, trpo(), total_steps=1, micro_tokens=10**9)
    view = learner._view(rows, 0)
    then = view.distribution()[1].detach()
    with torch.no_grad():
        policy.model.layers.layers[-1].bias += torch.tensor([0.0, 1.0, -1.0])  # type: ignore[union-attr, operator]
        now = policy.distribution(rows)
    expected = (then.exp() * (then - now)).sum(-1).mean()
    assert view.judge(then)[1] == pytest.approx(float(expected), rel=1e-5)
    assert float(expected) > 0.1
    reverse = (now.exp() * (now - then)).sum(-1).mean()
    assert abs(float(reverse) - float(expected)) > 1e-3
