"""Stock in stores and a warehouse, ordered ahead of a demand nobody knows; its dynamics run in NumPy and in torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from panoply.errors import PanoplyError
from panoply.registry import world
from panoply.seeds import numpy_rng
from panoply.worlds.control.drawing import BLUE, FAINT, GOLD, INK, RED, Canvas
from panoply.worlds.control.draws import Draws
from panoply.worlds.control.simulated import Moved, Simulated, State
from panoply.worlds.control.world import Array, Box, Space


class Stock(NamedTuple):
    """Arrays or tensors; the first number of a pipeline is on hand, the others arrive in 1, 2, … periods."""

    stores: Any
    """[rows, stores, lead]"""
    warehouse: Any
    """[rows, warehouse_lead], or None."""


@world("inventory@1", paper=60)
@dataclass(frozen=True)
class Inventory(Simulated):
    """Order stock for stores before the demand of a period is known (Alvo et al. 2023, arXiv 2306.11246).

    A period costs `penalty` for each piece asked for and not there, and `holding` for each piece left over; the reward
    is minus the cost a store. What is ordered arrives `lead` periods later. Demand that is not met is `lost`, or waits.
    Demands are Poisson with mean `mean`; of several stores, with means of their own around it. With a `warehouse`,
    stores get at most what is on hand there, shared out in proportion, and the last number of an action is the
    warehouse's own order.

    Demand does not depend on what is done, so the same demands can be run again: `costs` unrolls a policy in torch, and
    its gradient is exact.
    """

    stores: int = 1
    lead: int = 4
    mean: float = 5.0
    holding: float = 1.0
    penalty: float = 9.0
    lost: bool = True
    warehouse: bool = False
    warehouse_lead: int = 3
    warehouse_holding: float = 0.5
    most: float = 40.0
    """The largest order of a store."""
    seed: int = 0
    """Draws the stores' means."""
    horizon: int | None = 50

    access = Simulated.access | {"differentiable", "params"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.stores, self.lead, self.warehouse_lead) < 1:
            raise PanoplyError("inventory.stores and lead times are at least 1.")
        if min(self.mean, self.penalty, self.most) <= 0:
            raise PanoplyError("inventory.mean, penalty and most are above 0.")

    @property
    def means(self) -> Array:
        """Mean demand of each store: half to one and a half times `mean` where there are several."""
        if self.stores == 1:
            return np.array([self.mean])
        return self.mean * (0.5 + numpy_rng("inventory", self.seed).random(self.stores))

    @property
    def sees(self) -> Space:  # type: ignore[override]
        return Box((self.stores * self.lead + self.warehouse * self.warehouse_lead,))

    @property
    def takes(self) -> Space:  # type: ignore[override]
        limits = (self.most,) * self.stores + ((self.most * self.stores,) if self.warehouse else ())
        return Box((len(limits),), (0.0,) * len(limits), limits)

    # -------------------------------------------------------------- one period, in NumPy or torch

    def period(self, stock: Stock, orders: Any, demand: Any) -> tuple[Stock, Any]:
        """Stock after a period, and its cost in each row."""
        wanted = orders[:, : self.stores]
        warehouse, extra = stock.warehouse, 0.0
        if self.warehouse:
            total, there = wanted.sum(-1), warehouse[:, 0]
            share = (there / total.clip(min=1e-9)).clip(max=1.0)
            wanted = wanted * share[:, None]
            left = (there - wanted.sum(-1)).clip(min=0.0)
            extra = self.warehouse_holding * left
            warehouse = _arrived(left[:, None], warehouse[:, None], orders[:, self.stores :])[:, 0]
        on_hand = stock.stores[..., 0] - demand
        cost = self.penalty * (-on_hand).clip(min=0.0) + self.holding * on_hand.clip(min=0.0)
        kept = on_hand.clip(min=0.0) if self.lost else on_hand
        return Stock(_arrived(kept, stock.stores, wanted), warehouse), cost.sum(-1) + extra

    def costs(
        self, policy: Callable[[torch.Tensor], torch.Tensor], demand: torch.Tensor, ignore: int = 0
    ) -> torch.Tensor:
        """Mean cost of a store and period under a policy of observations, for demands [rows, periods, stores].

        Gradients flow through the whole unrolled run. The first `ignore` periods are not counted.
        """
        rows = len(demand)
        start = self._empty(rows)
        stock = Stock(*(None if part is None else torch.from_numpy(part).to(demand) for part in start))
        paid = []
        for t in range(demand.shape[1]):
            stock, cost = self.period(stock, policy(_flat(stock)), demand[:, t])
            paid.append(cost)
        return torch.stack(paid[ignore:]).mean() / self.stores

    def demands(self, seeds: Array, periods: int) -> Array:
        """[rows, periods, stores]: what the environments of these seeds will be asked for."""
        return np.stack([self._demand(Draws(seeds, t + 1)) for t in range(periods)], 1)

    def _demand(self, draws: Draws) -> Array:
        asked: Array = (draws.uniform(self.stores)[..., None] >= _quantiles(self)).sum(-1)
        return asked.astype(np.float64)

    # -------------------------------------------------------------- the world

    def _empty(self, rows: int) -> Stock:
        """A mean demand in every place of the pipelines."""
        stores = np.broadcast_to(self.means[:, None], (rows, self.stores, self.lead)).copy()
        warehouse = np.full((rows, self.warehouse_lead), self.means.sum()) if self.warehouse else None
        return Stock(stores, warehouse)

    def start(self, draws: Draws) -> State:
        return _columns(self._empty(len(draws.seeds)))

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        orders = np.clip(actions.astype(np.float64), 0.0, np.asarray(self.takes.high))  # type: ignore[union-attr]
        stock, cost = self.period(_stock(state), orders, self._demand(draws))
        return Moved(
            _columns(stock), -cost / self.stores, np.zeros(len(cost), bool), {"cost": cost / self.stores}
        )

    def signals(self) -> frozenset[str] | None:
        return frozenset({"reward", "cost"})

    def look(self, state: State) -> Array:
        seen: Array = _flat(_stock(state)).astype(np.float32)
        return seen

    # -------------------------------------------------------------- heuristics

    def order_up_to(self, seen: Any, levels: Any, warehouse: float = 0.0) -> Any:
        """The base-stock rule: raise each store's stock, with what is under way, to its level; of observations."""
        width = self.stores * self.lead
        position = seen[:, :width].reshape(-1, self.stores, self.lead).sum(-1)
        orders = (levels - position).clip(min=0.0)
        if not self.warehouse:
            return orders
        echelon = seen[:, width:].sum(-1) + position.sum(-1)
        return _concatenate([orders, (warehouse - echelon).clip(min=0.0)[:, None]])

    def newsvendor(self, periods: int) -> Array:
        """The levels that cover the demand of so many periods with probability penalty / (penalty + holding)."""
        wanted = self.penalty / (self.penalty + self.holding)
        return np.array([_poisson_quantile(periods * mean, wanted) for mean in self.means], np.float64)

    def expert(self, state: State) -> Array:
        """Base stock at the newsvendor's levels, which is best where unmet demand waits."""
        levels = self.newsvendor(self.lead + 1)
        through = float(self.newsvendor(self.lead + self.warehouse_lead + 1).sum())
        orders: Array = self.order_up_to(_flat(_stock(state)), levels, through)
        return orders

    def picture(self, state: State, size: int = 240) -> Array:
        """A column for each store, and one for the warehouse: on hand, and above it what is under way."""
        pipelines = [*state["stores"][0], *(state["warehouse"][:1] if self.warehouse else ())]
        top = max(4 * self.mean * (self.lead + 1), *(float(p.sum()) for p in pipelines))
        sheet = Canvas(size, (0, len(pipelines)), (-0.1 * len(pipelines), len(pipelines)))
        for place, pipeline in enumerate(pipelines):
            low, scale = 0.0, len(pipelines) / top
            for part, amount in enumerate(pipeline.tolist()):
                colour = (BLUE if place < self.stores else GOLD) if part == 0 else FAINT
                high = low + max(amount, 0.0) * scale
                if high > low:
                    sheet.box((place + 0.2, low), (place + 0.8, high), colour)
                low = high
            if pipeline[0] < 0:
                sheet.box(
                    (place + 0.2, max(pipeline[0] * scale, -0.1 * len(pipelines))), (place + 0.8, 0), RED
                )
        sheet.line([(0, 0), (len(pipelines), 0)], INK, 0.01 * len(pipelines))
        return sheet.pixels()


def _stock(state: State) -> Stock:
    return Stock(state["stores"], state.get("warehouse"))


def _columns(stock: Stock) -> State:
    return {"stores": stock.stores} | ({} if stock.warehouse is None else {"warehouse": stock.warehouse})


def _flat(stock: Stock) -> Any:
    stores = stock.stores.reshape(len(stock.stores), -1)
    return stores if stock.warehouse is None else _concatenate([stores, stock.warehouse])


def _arrived(kept: Any, pipeline: Any, ordered: Any) -> Any:
    """Everything under way one period nearer; what was ordered joins at the far end."""
    if pipeline.shape[-1] == 1:
        return (kept + ordered)[..., None]
    return _concatenate([(kept + pipeline[..., 1])[..., None], pipeline[..., 2:], ordered[..., None]])


def _concatenate(parts: list[Any]) -> Any:
    return torch.cat(parts, -1) if isinstance(parts[0], torch.Tensor) else np.concatenate(parts, -1)


@functools.lru_cache(maxsize=32)
def _quantiles(world: Inventory) -> Array:
    """[stores, counts]: cumulative probabilities of a Poisson demand, for drawing."""
    top = int(world.means.max() + 12 * math.sqrt(world.means.max()) + 12)
    return np.stack([np.cumsum(_poisson(mean, top)) for mean in world.means])


def _poisson(mean: float, top: int) -> Array:
    counts = np.arange(top + 1)
    logs = counts * math.log(mean) - mean - np.array([math.lgamma(k + 1) for k in counts])
    chances: Array = np.exp(logs)
    return chances


def _poisson_quantile(mean: float, probability: float) -> int:
    top = int(mean + 12 * math.sqrt(mean) + 12)
    return int(np.searchsorted(np.cumsum(_poisson(mean, top)), probability))
