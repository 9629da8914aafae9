"""Inventory: periods by hand, costs against exact dynamic programming, gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from panoply.errors import PanoplyError
from panoply.worlds.control.inventory import Inventory, Stock, _poisson
from panoply.worlds.control.world import Box


def test_a_period_by_hand() -> None:
    """7 on hand, 5 are asked for: 2 are left over; 3 arrive; the order joins at the end. Then 9 asked, 5 there."""
    world = Inventory(lead=3, holding=1, penalty=9)
    stock, cost = world.period(
        Stock(np.array([[[7.0, 3.0, 4.0]]]), None), np.array([[6.0]]), np.array([[5.0]])
    )
    assert stock.stores.tolist() == [[[5, 4, 6]]]
    assert cost.tolist() == [2]
    after, cost = world.period(stock, np.array([[0.0]]), np.array([[9.0]]))
    assert after.stores.tolist() == [[[4, 6, 0]]]
    assert cost.tolist() == [36]
    waits = Inventory(lead=3, lost=False)
    after, _ = waits.period(stock, np.array([[0.0]]), np.array([[9.0]]))
    assert after.stores.tolist() == [[[0, 6, 0]]]


def test_a_warehouse_shares_out_what_it_has() -> None:
    """9 on hand, 4 and 8 wanted: 3 and 6 are sent. 10 on hand, 4 wanted: 6 are left, at 0.5 each."""
    world = Inventory(stores=2, lead=1, warehouse=True, warehouse_lead=2)
    stock = Stock(np.zeros((1, 2, 1)), np.array([[9.0, 5.0]]))
    after, cost = world.period(stock, np.array([[4.0, 8.0, 7.0]]), np.zeros((1, 2)))
    assert after.stores.tolist() == [[[3], [6]]]
    assert after.warehouse.tolist() == [[5, 7]]
    assert cost.tolist() == [0]
    stock = Stock(np.zeros((1, 2, 1)), np.array([[10.0, 5.0]]))
    after, cost = world.period(stock, np.array([[4.0, 0.0, 0.0]]), np.zeros((1, 2)))
    assert after.warehouse.tolist() == [[11, 0]]
    assert cost.tolist() == [3]
    assert world.action == Box((3,), (0.0, 0.0, 0.0), (40.0, 40.0, 80.0))


def best_average_cost(penalty: float, top: int = 40) -> float:
    """One store, lost demand, lead time 1, Poisson(5): relative value iteration over whole numbers on hand."""
    demand = _poisson(5.0, 60)
    left = np.zeros((top + 1, top + 1))
    cost = np.zeros(top + 1)
    for x in range(top + 1):
        for d, p in enumerate(demand):
            left[x, max(x - d, 0)] += p
            cost[x] += p * (penalty * max(d - x, 0) + max(x - d, 0))
    values = np.zeros(top + 1)
    for _ in range(200):  # an order is chosen before the demand is seen: [left over, ordered]
        padded = np.concatenate([values, np.full(top, values.max())])
        after = np.stack([padded[kept : kept + top + 1] for kept in range(top + 1)])
        new = cost + (left @ after).min(-1)
        values = new - new[0]
    return float(new[0])


def test_base_stock_is_near_the_best_that_is_possible() -> None:
    """Zipkin (2008): the best average cost at lead time 1 and penalty 4 is 4.04."""
    best = best_average_cost(4.0)
    assert best == pytest.approx(4.04, abs=0.005)
    world = Inventory(lead=1, penalty=4.0)
    demand = torch.from_numpy(world.demands(np.arange(400), 120))
    paid = {
        level: float(
            world.costs(lambda seen, s=level: world.order_up_to(seen, torch.tensor([s])), demand, 20)
        )  # type: ignore[misc]
        for level in (9.0, 10.0, 11.0, 12.0, 13.0)
    }
    assert best * 0.99 < min(paid.values()) < best * 1.06
    assert world.newsvendor(2).tolist() == [13]


def test_the_world_and_the_unrolled_run_cost_the_same() -> None:
    world = Inventory(stores=3, lead=2, warehouse=True)
    seeds, rows = np.arange(5), 5
    envs = world.envs(rows)
    envs.reset(np.arange(rows), seeds)
    total = 0.0
    for _ in range(20):
        total += envs.step(world.expert(envs.state)).reward.sum()
    levels, through = world.newsvendor(3), float(world.newsvendor(6).sum())
    unrolled = world.costs(
        lambda seen: world.order_up_to(seen, torch.from_numpy(levels), through),
        torch.from_numpy(world.demands(seeds, 20)),
    )
    assert float(unrolled) == pytest.approx(-total / 20 / rows, rel=1e-9)


def test_gradients_flow_through_the_run() -> None:
    """Orders of w · on hand + b: derivatives by w and b against finite differences, in float64."""
    world = Inventory(lead=2)
    demand = torch.from_numpy(world.demands(np.arange(8), 15))

    def cost(w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return world.costs(lambda seen: torch.nn.functional.softplus(seen[:, :1] * w + b), demand)

    w, b = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (-0.31, 6.13))
    cost(w, b).backward()
    for value, grad in ((w, w.grad), (b, b.grad)):
        assert grad is not None
        moved = torch.tensor(1e-7, dtype=torch.float64)
        shifts = [(w + moved, b), (w - moved, b)] if value is w else [(w, b + moved), (w, b - moved)]
        slope = (cost(*shifts[0]).item() - cost(*shifts[1]).item()) / 2e-7
        assert float(grad) == pytest.approx(slope, rel=1e-5)


def test_demand_is_poisson_and_depends_on_the_seed_alone() -> None:
    world = Inventory()
    demand = world.demands(np.arange(2000), 10)
    assert demand.mean() == pytest.approx(5, abs=0.06)
    assert demand.var() == pytest.approx(5, abs=0.15)
    np.testing.assert_array_equal(world.demands(np.array([7]), 10)[0], demand[7])


def test_impossible_settings_are_refused_and_pictures_drawn() -> None:
    with pytest.raises(PanoplyError, match="inventory.stores and lead times are at least 1."):
        Inventory(lead=0)
    envs = Inventory(stores=3, warehouse=True, lost=False).envs(1)
    envs.reset(np.arange(1), np.arange(1))
    before = envs.render(0)
    envs.step(np.zeros((1, 4)))
    assert (envs.render(0) != before).any()
