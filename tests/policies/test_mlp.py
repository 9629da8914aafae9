"""Layers that are differentiated by hand: against finite differences, torch's own layers, and twice."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from panoply.policies.mlp import MLP

ACTIVATIONS: dict[str, nn.Module] = {"tanh": nn.Tanh(), "relu": nn.ReLU(), "elu": nn.ELU()}


def layers(activation: Any, hidden: tuple[int, ...]) -> MLP:
    made = MLP(3, hidden, 2, activation).double()
    generator = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        nn.init.normal_(weight, generator=generator)
    return made


@pytest.mark.parametrize("hidden", [(), (7,), (6, 5)])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_gradients_by_differences_and_theirs_too(activation: str, hidden: tuple[int, ...]) -> None:
    """Double: natural gradients differentiate the gradient."""
    made = layers(activation, hidden)
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).view(4, 3).requires_grad_()
    inputs = (x, *made.parameters())
    assert torch.autograd.gradcheck(lambda x, *_: made(x), inputs)
    assert torch.autograd.gradgradcheck(lambda x, *_: made(x), inputs)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_against_torchs_layers(activation: str) -> None:
    made = layers(activation, (6, 5))
    plain: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise([3, 6, 5, 2])):
        plain += [nn.Linear(a, b).double(), ACTIVATIONS[activation]] if i < 2 else [nn.Linear(a, b).double()]
    theirs = nn.Sequential(*plain)
    for mine, other in zip(made.parameters(), theirs.parameters(), strict=True):
        other.data = mine.data.clone()
    x = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(made(x), theirs(x))

    def slopes(model: nn.Module) -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))

    torch.testing.assert_close(slopes(made), slopes(theirs))


def test_resting_weights_have_no_gradient() -> None:
    """What is seen is differentiated, the layers are not (a policy's loss runs through a critic so)."""
    made = layers("relu", (6,)).requires_grad_(False)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    made(x).sum().backward()
    assert x.grad is not None
    assert all(weight.grad is None for weight in made.parameters())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_not_a_number_stays_so(activation: Any) -> None:
    """In any width, learning and acting: a network that has run away must be seen to."""
    net = MLP(3, (8, 12), 1, activation)
    net.initialise(torch.Generator().manual_seed(0))
    with torch.no_grad():
        net.layers[0].weight[0, 0] = torch.nan
        assert net(torch.ones(2, 3)).isnan().all()
    assert net(torch.ones(2, 3)).isnan().all()
    assert np.isnan(net.numpy()(np.ones((2, 3), np.float32))).all()
