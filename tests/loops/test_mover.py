"""What moves weights: rates, clips, and what optimisers keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from panoply.errors import PanoplyError
from panoply.loops.mover import Diverged, Masters, Mover, guard
from panoply.parts import Part, part
from panoply.slots.schedule.schedules import constant, linear
from panoply.slots.update.momentum import momentum
from panoply.slots.update.optimisers import adam, sgd
from panoply.slots.update.solver import Solver


def made(update: Part, schedule: Part | None = None) -> tuple[nn.Parameter, Mover]:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    return weight, Mover(Masters({"w": weight}), update, 4, schedule)


def test_rates_are_the_optimisers_times_the_schedule() -> None:
    """A line from 1 to 0 over 4 steps; a loss may have a schedule of its own."""
    _, plain = made(sgd(lr=0.5, schedule=linear()))
    assert [plain.set_rate(step) for step in range(5)] == pytest.approx([0.5, 0.375, 0.25, 0.125, 0])
    _, own = made(sgd(lr=0.5, schedule=linear()), constant())
    assert own.set_rate(3) == 0.5 == own.rate


def test_an_update_need_say_no_more_than_which_optimiser_it_is(registries: None) -> None:
    """No lr, clip or schedule among its settings: groups keep their own rates, and gradients are not cut."""

    @part("update")
    def toy_two_rates(parameters: list[nn.Parameter], *, scale: float = 1.0) -> torch.optim.Optimizer:
        (weight,) = parameters
        fast = nn.Parameter(torch.ones(1))
        return torch.optim.SGD([{"params": [weight], "lr": scale}, {"params": [fast], "lr": 2 * scale}])

    weight, mover = made(toy_two_rates(scale=0.25))
    assert mover.set_rate(3) == 0.25
    assert [group["lr"] for group in mover.optimiser.param_groups] == [0.25, 0.5]
    weight.grad = torch.tensor([30.0, 40.0])
    assert mover.clip() == 50
    mover.move()
    assert weight.tolist() == [1 - 7.5, 2 - 10.0]


def test_numbers_that_are_schedules_are_followed() -> None:
    _, mover = made(momentum(eta=linear(end=0.5)))
    mover.set_rate(2)
    assert mover.optimiser.param_groups[0]["eta"] == 0.75
    _, still = made(momentum(eta=0.3))
    still.set_rate(2)
    assert still.optimiser.param_groups[0]["eta"] == 0.3


def test_the_clip_is_of_the_whole_gradient() -> None:
    weight, mover = made(sgd(lr=1.0, clip=5.0))
    weight.grad = torch.tensor([30.0, 40.0])
    assert mover.clip() == 50
    assert weight.grad.tolist() == pytest.approx([3, 4], rel=1e-6)


def test_what_is_kept_comes_back_bit_for_bit() -> None:
    slopes = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))

    def go(mover: Mover, weight: nn.Parameter, rows: torch.Tensor) -> None:
        for slope in rows:
            weight.grad = slope.clone()
            mover.move()

    weight, mover = made(adam(lr=0.1))
    go(mover, weight, slopes[:3])
    again, resumed = made(adam(lr=0.1))
    with torch.no_grad():
        again.copy_(weight)
    resumed.load_state({name: value.clone() for name, value in mover.state().items()})
    go(mover, weight, slopes[3:])
    go(resumed, again, slopes[3:])
    assert torch.equal(weight, again)
    assert set(mover.state()) == {"w:step", "w:exp_avg", "w:exp_avg_sq"}


def test_what_cannot_be_saved_is_refused_after_the_first_step(registries: None) -> None:
    class Hoarder(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.state[self.param_groups[0]["params"][0]]["past"] = []

    @part("update")
    def toy_hoarder(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return Hoarder(parameters)

    _, mover = made(toy_hoarder())
    with pytest.raises(PanoplyError) as caught:
        mover.move()
    assert str(caught.value) == (
        "update.toy_hoarder keeps 'past' of its weights, list, which cannot be saved: keep tensors and numbers."
    )


def test_a_solver_that_overrides_nothing_wants_nothing(registries: None) -> None:
    class Quiet(Solver, torch.optim.SGD): ...

    @part("update")
    def toy_quiet(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return Quiet(parameters)

    for update in (toy_quiet(), sgd()):
        weight, mover = made(update)
        assert list(mover.visits(torch.Generator())) == [False]
        mover.settle()
        assert weight.tolist() == [1, 2]
    assert mover.solver is None


def test_the_guard() -> None:
    guard("loss", 1e30)
    with pytest.raises(Diverged, match=r"Stopped: loss is nan; the weights of the last good step are kept\."):
        guard("loss", float("nan"))
