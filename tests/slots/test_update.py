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


def test_adam_is_torchs() -> None:
    """Several weights of two kinds, one without a gradient at first: bit for bit what AdamW makes of them."""
    generator = torch.Generator().manual_seed(0)
    kinds = [(3, torch.float32), (2, torch.float64), (4, torch.float32)]
    mine = [nn.Parameter(torch.randn(n, generator=generator, dtype=d)) for n, d in kinds]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in mine]
    ours = adam(lr=0.1, weight_decay=0.01, epsilon=1e-5)(mine)
    torchs = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.01, eps=1e-5, fused=True)
    counted: list[int] = []
    ours.register_step_post_hook(lambda *_: counted.append(1))
    for step in range(4):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            slope = torch.randn(a.shape, generator=generator, dtype=a.dtype)
            a.grad = b.grad = None if i == 2 and step == 0 else slope
        ours.step()
        torchs.step()
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert len(counted) == 4
    assert ours.state[mine[2]].keys() == torchs.state[theirs[2]].keys()
