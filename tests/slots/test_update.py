"""Optimisers, one step by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from panoply.parts import Part
from panoply.slots.update.optimisers import adam, sgd


def moved(part: Part, gradients: list[float]) -> float:
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimiser = part([weight])
    for g in gradients:
        weight.grad = torch.tensor([g], dtype=torch.float64)
        optimiser.step()
    return float(weight.detach())


def test_sgd() -> None:
    assert moved(sgd(lr=0.1), [2.0]) == pytest.approx(0.8)
    assert moved(sgd(lr=0.1, momentum=0.5), [2.0, 2.0]) == pytest.approx(1 - 0.2 - 0.3)


def test_adam() -> None:
    """The first step is the learning rate in the gradient's direction, whatever its size."""
    assert moved(adam(lr=0.1), [20.0]) == pytest.approx(0.9, abs=1e-6)
    assert moved(adam(lr=0.1, weight_decay=0.5), [-3.0]) == pytest.approx(1 - 0.1 * 0.5 + 0.1, abs=1e-6)
    m, v = 0.5 * 0.5 * 1.0 + 0.5 * 3.0, 0.9 * 0.1 * 1.0 + 0.1 * 9.0
    second = 0.1 * (m / (1 - 0.25)) / (v / (1 - 0.81)) ** 0.5
    assert moved(adam(lr=0.1, beta1=0.5, beta2=0.9), [1.0, 3.0]) == pytest.approx(1 - 0.1 - second, abs=1e-6)
