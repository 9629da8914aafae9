"""Inventory: periods by hand, costs against exact dynamic programming, gradients against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from panoply.errors import PanoplyError
from panoply.worlds.control.inventory import Inventory, Stock
from panoply.worlds.control.world import Box
from panoply.worlds.control.yardsticks import best_rule, costs_of_rules, optimum


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
    stock = Stock(np.zeros((1, 2, 1)), np.array([[[9.0, 5.0]]]))
    after, cost = world.period(stock, np.array([[4.0, 8.0, 7.0]]), np.zeros((1, 2)))
    assert after.stores.tolist() == [[[3], [6]]]
    assert after.warehouse.tolist() == [[[5, 7]]]
    assert cost.tolist() == [0]
    stock = Stock(np.zeros((1, 2, 1)), np.array([[[10.0, 5.0]]]))
    after, cost = world.period(stock, np.array([[4.0, 0.0, 0.0]]), np.zeros((1, 2)))
    assert after.warehouse.tolist() == [[[11, 0]]]
    assert cost.tolist() == [3]
    assert world.action == Box((3,), (0.0, 0.0, 0.0), (40.0, 40.0, 80.0))


def test_echelons_pass_on_what_they_have() -> None:
    """The store wants 4 and gets them; the first warehouse wants 9 of the second, which has 6; that orders 5."""
    world = Inventory(lead=1, warehouse=True, warehouse_lead=2, echelons=2)
    stock = Stock(np.array([[[3.0]]]), np.array([[[7.0, 1.0], [6.0, 2.0]]]))
    after, cost = world.period(stock, np.array([[4.0, 9.0, 5.0]]), np.array([[2.0]]))
    assert after.stores.tolist() == [[[1 + 4]]]
    assert after.warehouse.tolist() == [[[3 + 1, 6], [0 + 2, 5]]]
    assert cost.tolist() == [1 + 0.5 * 3]
    assert world.observation == Box((5,), nodes=(1, 1))
    assert world.action == Box((3,), (0.0,) * 3, (40.0, 40.0, 40.0))


def test_shares_by_softmax() -> None:
    """Preferences 1 and 1 + log 2 beside the 1 that stays: a quarter, a half, and a quarter of 8; and of torch."""
    world = Inventory(stores=2, lead=1, warehouse=True, warehouse_lead=1, allocation="softmax")
    orders = np.array([[1.0, 1 + math.log(2), 3.0]])
    stock = Stock(np.zeros((1, 2, 1)), np.array([[[8.0]]]))
    after, cost = world.period(stock, orders, np.zeros((1, 2)))
    np.testing.assert_allclose(after.stores[0, :, 0], [2, 4])
    np.testing.assert_allclose(after.warehouse, [[[2 + 3]]])
    assert cost.tolist() == [pytest.approx(0.5 * 2)]
    same, _ = world.period(Stock(*map(torch.from_numpy, stock)), torch.from_numpy(orders), torch.zeros(1, 2))
    np.testing.assert_allclose(same.stores, after.stores)
    assert world.action == Box((3,), (-10.0, -10.0, 0.0), (10.0, 10.0, 80.0))


def test_correlated_demands() -> None:
    """Still Poisson, each with its mean; of two stores, nearly as alike as asked."""
    world = Inventory(stores=2, correlation=0.5)
    demand = world.demands(np.arange(3000), 4).reshape(-1, 2)
    np.testing.assert_allclose(demand.mean(0), world.means, rtol=0.03)
    np.testing.assert_allclose(demand.var(0), world.means, rtol=0.06)
    assert np.corrcoef(demand.T)[0, 1] == pytest.approx(0.5, abs=0.04)
    apart = Inventory(stores=2).demands(np.arange(3000), 4).reshape(-1, 2)
    assert abs(np.corrcoef(apart.T)[0, 1]) < 0.04


def test_stores_of_a_network_are_told_apart_by_their_means() -> None:
    world = Inventory(stores=3, lead=2, warehouse=True)
    envs = world.envs(1)
    envs.reset(np.arange(1), np.arange(1))
    rows = envs.observations[0, :9].reshape(3, 3)
    np.testing.assert_allclose(rows[:, 2], world.means, rtol=1e-6)
    assert world.observation == Box((9 + 3,), nodes=(3, 3))


@pytest.mark.parametrize(
    ("lead", "penalty", "cost"),
    [(1, 4.0, 4.04), (1, 9.0, 5.44), (1, 19.0, 6.68), (2, 4.0, 4.40), (2, 9.0, 6.09)],
)
def test_the_optimum_is_zipkins(lead: int, penalty: float, cost: float) -> None:
    """Average costs that Zipkin (2008) reports, to the digits he gives."""
    assert optimum(Inventory(lead=lead, penalty=penalty), top=30) == pytest.approx(cost, abs=0.0051)


def test_the_best_rules_are_near_the_optimum() -> None:
    """At lead time 2: nothing is below the optimum, a cap helps, and the capped rule is within 1 %."""
    world = Inventory(lead=2)
    demand = world.demands(np.arange(2000) + 2**41, 100)
    plain, capped = (best_rule(world, capped=c) for c in (False, True))
    found = costs_of_rules(world, *np.array([plain, capped]).T, demand, ignore=20)
    best = optimum(world, top=30)
    assert best * 0.995 < found[1] < found[0] < best * 1.06
    assert found[1] < best * 1.01
    seen = torch.tensor([[3.0, 4.0]])
    assert plain[1] == np.inf
    assert world.order_up_to(seen, torch.tensor([plain[0]]))[0, 0] == plain[0] - 7


def test_yardsticks_are_for_one_store() -> None:
    with pytest.raises(PanoplyError, match="for one store without a warehouse"):
        best_rule(Inventory(stores=2))
    with pytest.raises(PanoplyError, match="lead times of 1 and 2"):
        optimum(Inventory(lead=3))


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
    with pytest.raises(PanoplyError, match="inventory.lead must be from 1 to 1000, not 0."):
        Inventory(lead=0)
    with pytest.raises(PanoplyError, match="set warehouse=true"):
        Inventory(allocation="softmax")
    with pytest.raises(PanoplyError, match="correlation must be from 0 to 1, not 2"):
        Inventory(correlation=2.0)
    with pytest.raises(PanoplyError, match="has an expert for orders from one warehouse"):
        Inventory(warehouse=True, echelons=2).expert({})
    envs = Inventory(stores=3, warehouse=True, lost=False).envs(1)
    envs.reset(np.arange(1), np.arange(1))
    before = envs.render(0)
    envs.step(np.zeros((1, 4)))
    assert (envs.render(0) != before).any()
