"""Stock in stores and a warehouse, ordered ahead of a demand nobody knows; its dynamics run in NumPy and in torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from panoply.errors import PanoplyError
from panoply.evidence.claims import Ranks
from panoply.evidence.races import UNTRAINED_COST
from panoply.registry import world
from panoply.seeds import numpy_rng
from panoply.worlds.control.drawing import BLUE, FAINT, GOLD, INK, RED, Canvas
from panoply.worlds.control.simulated import Draws, Moved, Simulated, State
from panoply.worlds.control.world import Array, Box, Space

Policy = Callable[[torch.Tensor], torch.Tensor]
PREFERENCE = 10.0
"""How far preferences go: e¹⁰ times as much as what stays, or as little."""


class Stock(NamedTuple):
    """Arrays or tensors; the first number of a pipeline is on hand, the others arrive in 1, 2, … periods."""

    stores: Any
    """[rows, stores, lead]"""
    warehouse: Any
    """[rows, echelons, warehouse_lead], the one that serves the stores first; or None."""


CLAIM = Ranks(
    "With demands of sixteen episodes to learn from, a warehouse and ten stores cost less on new demands under one "
    "network for all stores than under one that takes them all at once.",
    ("shared=hdpo:policy.shared=true", "flat=hdpo"),
    world="inventory",
    budget="decisions=120k",
    metric="held_out_greedy",
    settings={
        "world.stores": 10,
        "world.warehouse": True,
        "data.batch": 16,
        "data.pool": 16,
        "run.held_out": 100,
        "run.episodes_every": 0,
    },
    tune={"update.lr": (1e-3, 3e-3, 1e-2)},
    tuned_by="area:held_out_greedy",
    waives={"room": UNTRAINED_COST},
)


@world("inventory@1", paper=60, claim=CLAIM)
@dataclass(frozen=True)
class Inventory(Simulated):
    """Order stock for stores before the demand of a period is known (Alvo et al. 2023, arXiv 2306.11246).

    A period costs `penalty` for each piece asked for and not there, and `holding` for each piece left over; the reward
    is minus the cost a store. What is ordered arrives `lead` periods later. Demand that is not met is `lost`, or waits.
    Demands are Poisson with mean `mean`; of several stores, with means of their own around it, which are seen, and
    correlated where asked. With a `warehouse`, stores get at most what is on hand there, and the last number of an
    action is the warehouse's own order; with several `echelons` it orders from another one above it, and so on.

    What a warehouse has is shared out in proportion to the orders. With `allocation=softmax` the numbers of an action,
    but for the last, are preferences z instead: each gets softmax([z…, 1]) of it, and the share of the 1 stays.

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
    echelons: int = 1
    """Warehouses one above the other."""
    allocation: Literal["proportional", "softmax"] = "proportional"
    correlation: float = 0.0
    """Of the demands of different stores, before they are made Poisson (a Gaussian copula)."""
    most: float = 40.0
    """The largest order of a store."""
    seed: int = 0
    """Draws the stores' means."""
    horizon: int | None = 50

    bounds: ClassVar[Mapping[str, str]] = {
        "stores": "from 1 to 10000",
        "lead": "from 1 to 1000",
        "mean": "above 0",
        "holding": "at least 0",
        "penalty": "above 0",
        "warehouse_lead": "from 1 to 1000",
        "warehouse_holding": "at least 0",
        "echelons": "from 1 to 1000",
        "correlation": "from 0 to 1",
        "most": "above 0",
        "seed": "any whole number",
        "horizon": "from 1 to 10000000",
    }

    access = Simulated.access | {"differentiable", "params"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.warehouse and (self.echelons > 1 or self.allocation != "proportional"):
            raise PanoplyError("inventory.echelons and allocation are a warehouse's: set warehouse=true.")

    @property
    def means(self) -> Array:
        """Mean demand of each store: half to one and a half times `mean` where there are several."""
        if self.stores == 1:
            return np.array([self.mean])
        return self.mean * (0.5 + numpy_rng("inventory", self.seed).random(self.stores))

    @property
    def sees(self) -> Space:  # type: ignore[override]
        row, above = self.lead + (self.stores > 1), self.warehouse * self.echelons * self.warehouse_lead
        return Box((self.stores * row + above,), nodes=(self.stores, row))

    @property
    def takes(self) -> Space:  # type: ignore[override]
        if not self.warehouse:
            return Box((self.stores,), (0.0,) * self.stores, (self.most,) * self.stores)
        asked, all_of_it = self.stores + self.echelons - 1, self.most * self.stores
        if self.allocation == "softmax":
            low, high = (-PREFERENCE,) * asked, (PREFERENCE,) * asked
        else:
            low = (0.0,) * asked
            high = (self.most,) * self.stores + (all_of_it,) * (self.echelons - 1)
        return Box((asked + 1,), (*low, 0.0), (*high, all_of_it))

    # -------------------------------------------------------------- one period, in NumPy or torch

    def period(self, stock: Stock, orders: Any, demand: Any) -> tuple[Stock, Any]:
        """Stock after a period, and its cost in each row."""
        sent, above, extra = orders[:, : self.stores], stock.warehouse, 0.0
        if self.warehouse:
            sent, above, extra = self._sent(above, orders)
        on_hand = stock.stores[..., 0] - demand
        cost = self.penalty * (-on_hand).clip(min=0.0) + self.holding * on_hand.clip(min=0.0)
        kept = on_hand.clip(min=0.0) if self.lost else on_hand
        return Stock(_arrived(kept, stock.stores, sent), above), cost.sum(-1) + extra

    def _sent(self, above: Any, orders: Any) -> tuple[Any, Any, Any]:
        """What the stores are sent, the warehouses after that, and what holding the rest costs."""
        there, first = above[..., 0], self.stores
        asked = [orders[:, :first], *(orders[:, first + i : first + i + 1] for i in range(self.echelons - 1))]
        sent = [self._shared(each, there[:, i : i + 1]) for i, each in enumerate(asked)]
        left = (there - _concatenate([each.sum(-1)[:, None] for each in sent])).clip(min=0.0)
        arriving = _concatenate([*sent[1:], orders[:, -1:]])
        return sent[0], _arrived(left, above, arriving), self.warehouse_holding * left.sum(-1)

    def _shared(self, asked: Any, there: Any) -> Any:
        """[rows, n]: what each of n gets of what is there."""
        if self.allocation == "softmax":
            raised = torch.exp(asked) if isinstance(asked, torch.Tensor) else np.exp(asked)
            return there * raised / (raised.sum(-1)[:, None] + math.e)
        return asked * (there / asked.sum(-1)[:, None].clip(min=1e-9)).clip(max=1.0)

    def observe(self, stock: Stock) -> Any:
        """A row of numbers: every store's pipeline, with its mean demand where there are several; the warehouses'."""
        stores, rows = stock.stores, len(stock.stores)
        if self.stores > 1:
            means = np.broadcast_to(self.means[:, None], (rows, self.stores, 1))
            if isinstance(stores, torch.Tensor):
                stores = torch.cat([stores, torch.from_numpy(means.copy()).to(stores)], -1)
            else:
                stores = np.concatenate([stores, means], -1)
        parts = [stores] if stock.warehouse is None else [stores, stock.warehouse]
        return _concatenate([part.reshape(rows, -1) for part in parts])

    def unrolled(
        self, act: Policy, seeds: Array, steps: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """[rows, steps] rewards of the environments of these seeds, under a policy of observations."""
        demand = torch.from_numpy(self.demands(seeds, steps)).to(device, torch.float32)
        return -self.paid(act, demand)

    def costs(self, policy: Policy, demand: torch.Tensor, ignore: int = 0) -> torch.Tensor:
        """Mean cost of a store and period for demands [rows, periods, stores], the first `ignore` not counted."""
        return self.paid(policy, demand)[:, ignore:].mean()

    def paid(self, policy: Policy, demand: torch.Tensor) -> torch.Tensor:
        """[rows, periods] costs of a store. Gradients flow through the whole unrolled run."""
        start = self.opening(len(demand))
        stock = Stock(*(None if part is None else torch.from_numpy(part).to(demand) for part in start))
        least, most = (torch.tensor(b).to(demand) for b in (self.takes.low, self.takes.high))  # type: ignore[union-attr]
        found = []
        for today in demand.unbind(1):
            orders = policy(self.observe(stock)).maximum(least).minimum(most)
            stock, cost = self.period(stock, orders, today)
            found.append(cost)
        return torch.stack(found, 1) / self.stores

    def demands(self, seeds: Array, periods: int) -> Array:
        """[rows, periods, stores]: what the environments of these seeds will be asked for."""
        return np.stack([self._demand(Draws(seeds, t + 1)) for t in range(periods)], 1)

    def _demand(self, draws: Draws) -> Array:
        if self.correlation:
            common, own = draws.normal(1), draws.normal(self.stores)
            mixed = math.sqrt(self.correlation) * common + math.sqrt(1 - self.correlation) * own
            chance = torch.special.ndtr(torch.from_numpy(mixed)).numpy()
        else:
            chance = draws.uniform(self.stores)
        asked: Array = (chance[..., None] >= _quantiles(self)).sum(-1)
        return asked.astype(np.float64)

    # -------------------------------------------------------------- the world

    def opening(self, rows: int) -> Stock:
        """A mean demand in every place of the pipelines."""
        stores = np.broadcast_to(self.means[:, None], (rows, self.stores, self.lead)).copy()
        shape = (rows, self.echelons, self.warehouse_lead)
        warehouse = np.full(shape, self.means.sum()) if self.warehouse else None
        return Stock(stores, warehouse)

    def start(self, draws: Draws) -> State:
        return _columns(self.opening(len(draws.seeds)))

    def move(self, state: State, actions: Array, draws: Draws) -> Moved:
        least, most = np.asarray(self.takes.low), np.asarray(self.takes.high)  # type: ignore[union-attr]
        orders = np.clip(actions.astype(np.float64), least, most)
        stock, cost = self.period(_stock(state), orders, self._demand(draws))
        return Moved(
            _columns(stock), -cost / self.stores, np.zeros(len(cost), bool), {"cost": cost / self.stores}
        )

    def signals(self) -> frozenset[str] | None:
        return frozenset({"reward", "cost"})

    def look(self, state: State) -> Array:
        seen: Array = self.observe(_stock(state)).astype(np.float32)
        return seen

    # -------------------------------------------------------------- heuristics

    def order_up_to(self, seen: Any, levels: Any, warehouse: float = 0.0) -> Any:
        """The base-stock rule: raise each store's stock, with what is under way, to its level; of observations."""
        row = self.lead + (self.stores > 1)
        width = self.stores * row
        position = seen[:, :width].reshape(-1, self.stores, row)[..., : self.lead].sum(-1)
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
        if self.echelons > 1 or self.allocation != "proportional":
            raise PanoplyError(
                "inventory has an expert for orders from one warehouse at most, shared out in proportion."
            )
        levels = self.newsvendor(self.lead + 1)
        through = float(self.newsvendor(self.lead + self.warehouse_lead + 1).sum())
        orders: Array = self.order_up_to(self.observe(_stock(state)), levels, through)
        return orders

    def picture(self, state: State, size: int = 240) -> Array:
        """A column for each store, and one for the warehouse: on hand, and above it what is under way."""
        pipelines = [*state["stores"][0], *(state["warehouse"][0] if self.warehouse else ())]
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
    return np.stack([np.cumsum(poisson(mean, top)) for mean in world.means])


def poisson(mean: float, top: int) -> Array:
    counts = np.arange(top + 1)
    logs = counts * math.log(mean) - mean - np.array([math.lgamma(k + 1) for k in counts])
    chances: Array = np.exp(logs)
    return chances


def _poisson_quantile(mean: float, probability: float) -> int:
    top = int(mean + 12 * math.sqrt(mean) + 12)
    return int(np.searchsorted(np.cumsum(poisson(mean, top)), probability))
