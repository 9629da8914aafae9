"""What a policy for one store can be held against: the best rules of two well-known forms, and the exact optimum."""

from __future__ import annotations

import numpy as np

from panoply.errors import PanoplyError
from panoply.worlds.control.inventory import Inventory, poisson
from panoply.worlds.control.world import Array


def costs_of_rules(world: Inventory, levels: Array, caps: Array, demand: Array, ignore: int = 0) -> Array:
    """[rules] mean cost a period of ordering min(cap, level − position), for demands [rows, periods, 1]."""
    rules, rows = len(levels), len(demand)
    level, cap = np.repeat(levels, rows), np.repeat(caps, rows)
    stock, total = world.opening(rules * rows), np.zeros(rules * rows)
    for t in range(demand.shape[1]):
        orders = np.clip(level - stock.stores.sum((-1, -2)), 0.0, np.minimum(cap, world.most))[:, None]
        stock, cost = world.period(stock, orders, np.tile(demand[:, t], (rules, 1)))
        total += cost if t >= ignore else 0.0
    mean: Array = total.reshape(rules, rows).mean(1) / (demand.shape[1] - ignore)
    return mean


def best_rule(
    world: Inventory, rows: int = 64, periods: int = 120, capped: bool = True
) -> tuple[float, float]:
    """Level and cap of the best base-stock rule among whole numbers, by simulation; without a cap the last is ∞.

    A rule without a cap chases demand it has lost; with one it orders about the mean, which is near the best that can
    be done (Xin 2021, doi 10.1287/opre.2020.2047).
    """
    _check(world)
    demand = world.demands(np.arange(rows) + 2**40, periods)  # seeds of no start
    mean, top = world.mean, float(world.newsvendor(world.lead + 1)[0])
    levels = np.arange(np.floor(0.6 * top), np.ceil(1.3 * top) + 1)
    caps = np.arange(np.floor(mean), np.ceil(3 * mean) + 1) if capped else np.array([np.inf])
    level, cap = (each.ravel() for each in np.meshgrid(levels, caps))
    best = costs_of_rules(world, level, cap, demand, ignore=periods // 6).argmin()
    return float(level[best]), float(cap[best])


def optimum(world: Inventory, top: int = 40, close: float = 1e-9) -> float:
    """The least average cost, by relative value iteration over whole numbers; for lead times of 1 and 2.

    A state is what is on hand, and for a lead time of 2 also what arrives next; orders are chosen before the demand.
    """
    _check(world)
    if world.lead > 2 or not world.lost:
        raise PanoplyError("The exact optimum is computed for lost demand and lead times of 1 and 2.")
    here, demand = np.arange(top + 1), poisson(world.mean, 3 * top)
    left = np.zeros((top + 1, top + 1))
    for asked, chance in enumerate(demand):
        left[here, np.maximum(here - asked, 0)] += chance
    gap = here[:, None] - np.arange(len(demand))
    cost = (world.penalty * np.maximum(-gap, 0) + world.holding * np.maximum(gap, 0)) @ demand
    joined = np.minimum(here[:, None] + here, top)  # what is left over and what arrives
    values = np.zeros((top + 1, 1) if world.lead == 1 else (top + 1, top + 1))
    for _ in range(10_000):
        if world.lead == 1:
            new = cost[:, None] + (left @ values[joined, 0]).min(-1, keepdims=True)
        else:
            new = cost[:, None] + np.tensordot(left, values[joined], 1).min(-1)
        average, shifted = float(new[0, 0]), new - new[0, 0]
        if np.abs(shifted - values).max() < close:
            return average
        values = shifted
    raise PanoplyError("The average cost does not settle.")


def _check(world: Inventory) -> None:
    if world.stores != 1 or world.warehouse:
        raise PanoplyError("These yardsticks are for one store without a warehouse.")
