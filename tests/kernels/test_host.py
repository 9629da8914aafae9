"""What is written out by hand for a CPU, against what autograd makes of the plain expressions, in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from panoply.kernels import host

GENERATOR = torch.Generator().manual_seed(3)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64).requires_grad_()


def agree(found: Callable[[], Tensor], plain: Callable[[], Tensor], inputs: list[Tensor]) -> None:
    value, expected = found(), plain()
    torch.testing.assert_close(value, expected)
    weight = torch.linspace(-1, 2, value.numel(), dtype=torch.float64).view_as(value)
    slopes = torch.autograd.grad((value * weight).sum(), inputs)
    for slope, reference in zip(slopes, torch.autograd.grad((expected * weight).sum(), inputs), strict=True):
        torch.testing.assert_close(slope, reference)


def test_a_sum_and_its_norm() -> None:
    x, change, weight = numbers(5, 8), numbers(5, 8), numbers(8)

    def plain() -> Tensor:
        total = x + change
        return torch.cat([total, total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight])

    agree(lambda: torch.cat(host.add_norm(x, change, weight, 1e-5)), plain, [x, change, weight])
    # The stream alone, the norm alone, and nothing to add.
    agree(lambda: host.add_norm(x, change, weight, 1e-5)[0], lambda: x + change, [x, change])
    agree(lambda: host.add_norm(x, None, weight, 1e-5)[1], lambda: plain_norm(x, weight), [x, weight])


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def test_gates() -> None:
    both, weight = numbers(5, 12), numbers(4, 6)
    agree(
        lambda: host.gated_down(both, weight),
        lambda: (F.silu(both[:, :6]) * both[:, 6:]) @ weight.t(),
        [both, weight],
    )


def test_turning_by_hand_and_back() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    # The first pair (1, 3) by a quarter, the second (2, 4) not at all.
    cos, sin = host.angles(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    host.turn(x, 1, cos, sin)
    assert x.tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]
    host.turn(x, 1, cos, sin, -1.0)
    assert x.tolist() == [[[1.0, 2.0, 3.0, 4.0]]]


def test_powers_and_parts() -> None:
    from panoply.kernels.launching import parts_of, power_above

    assert [power_above(n) for n in (1, 2, 3, 4, 5, 896, 1024, 1025)] == [1, 2, 4, 4, 8, 1024, 1024, 2048]
    assert [parts_of(n, 8) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]
