"""Gradients that add up in float32 where they are made."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from panoply.kernels.summing import Sum, sum_product, summing, sums_of
from panoply.loops.mover import Masters
from panoply.policies.fused import joined, product
from panoply.policies.scoring import score_actions


def layers(outputs: tuple[int, ...] = (6, 2, 2)) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(8, n).bfloat16() for n in outputs]


def passes(of: list[nn.Linear], numbers: Sequence[int]) -> list[Tensor | None]:
    """Some passes over joined layers, and the gradients that autograd then has."""
    weight, bias = joined(of)
    weights, biases = [x.weight for x in of], [x.bias for x in of]
    for number in numbers:
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(number)).bfloat16()
        product(x.requires_grad_(), weight, bias, weights, biases).float().pow(2).sum().backward()
    return [x.grad for x in (*weights, *biases)]


def test_passes_add_up_in_float32_and_autograd_is_given_nothing() -> None:
    of = layers()
    weights = [*(layer.weight for layer in of), *(layer.bias for layer in of)]
    sums = {weight: Sum(weight) for weight in weights}
    with summing(sums):
        assert passes(of, range(3)) == [None] * 6
    apart = [passes(layers(), [number]) for number in range(3)]
    for weight, *parts in zip(weights, *apart, strict=True):
        total = sums[weight].total
        assert total is not None
        assert total.dtype == torch.float32
        wanted = torch.stack([part.float() for part in parts if part is not None]).sum(0)
        torch.testing.assert_close(total, wanted, atol=2e-2, rtol=2e-2)


def test_sums_of_joined_weights_lie_in_one_tensor_and_begin_anew() -> None:
    weights = [torch.zeros(n, 4) for n in (3, 2)]
    sums = [Sum(weight) for weight in weights]
    a, b = torch.randn(5, 7), torch.randn(7, 4)
    for times in (1, 2, 3):
        sum_product(sums, a, b)
        for each, part in zip(sums, (a @ b).split([3, 2]), strict=True):  # type: ignore[no-untyped-call]
            torch.testing.assert_close(each.total, times * part)
    assert sums[0].joint is not None
    assert sums[1].total is not None
    assert sums[1].total.untyped_storage().data_ptr() == sums[0].joint.untyped_storage().data_ptr()
    for each in sums:
        each.clear()
    sum_product(sums, a, b)
    torch.testing.assert_close(torch.cat([s.total for s in sums if s.total is not None]), a @ b)


def test_a_sum_that_one_of_several_has_already_is_kept() -> None:
    sums = [Sum(torch.zeros(n, 4)) for n in (3, 2)]
    before = torch.randn(2, 4)
    sums[1].add(before.clone())
    a, b = torch.randn(5, 7), torch.randn(7, 4)
    for _ in range(2):
        sum_product(sums, a, b)
    assert sums[1].total is not None
    torch.testing.assert_close(sums[1].total, before + 2 * (a @ b)[3:])


def test_only_weights_that_are_summed_and_only_inside() -> None:
    one, other = torch.zeros(2), torch.zeros(2)
    with summing({one: Sum(one)}):
        assert sums_of([one]) is not None
        assert sums_of([one, other]) is None
    assert sums_of([one]) is None


@pytest.mark.parametrize("entropy", [False, True])
def test_the_head_adds_its_gradient_too(entropy: bool) -> None:
    torch.manual_seed(1)
    head, hidden = (
        torch.randn(11, 8).bfloat16().requires_grad_(),
        torch.randn(5, 8).bfloat16().requires_grad_(),
    )

    def step() -> None:
        found = score_actions(hidden, head, torch.arange(5), entropy=entropy)
        torch.stack([column.sum() for column in found.values()]).sum().backward()

    step()
    alone, head.grad = head.grad, None
    assert alone is not None
    with summing({head: (each := Sum(head))}):
        step()
        step()
    assert head.grad is None
    assert each.total is not None
    torch.testing.assert_close(each.total, 2 * alone.float(), atol=1e-2, rtol=1e-2)


def test_masters_collect_what_was_summed_and_what_autograd_had() -> None:
    """A weight may have both: an embedding that is also the head."""
    weights = {
        name: nn.Parameter(torch.zeros(2, 2).bfloat16()) for name in ("summed", "both", "late", "left")
    }
    masters = Masters(weights)
    masters.sums = {name: Sum(weights[name]) for name in ("summed", "both", "late")}
    for number in range(3):
        with masters.summing():
            ones = torch.ones(2, 2)
            for name in ("summed", "both", *(("late",) if number else ())):
                masters.sums[name].add(ones.clone())
            for name in ("both", "left", *(() if number else ("late",))):
                weights[name].grad = ones.bfloat16() * 10
        masters.collect()
        assert all(w.grad is None for w in weights.values())
    found = {name: float(m.grad[0, 0]) for name, m in masters.masters.items() if m.grad is not None}
    assert found == {"summed": 3.0, "both": 33.0, "late": 12.0, "left": 30.0}
    masters.clear()
    assert all(m.grad is None for m in masters.masters.values())
    assert all(each.total is None and each.joint is None for each in masters.sums.values())
