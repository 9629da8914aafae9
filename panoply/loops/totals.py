"""Metrics of a learner: summed over micro-batches, averaged over steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from panoply.parts import Part


def mean_metrics(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the steps that have it."""
    names = dict.fromkeys(name for metrics in found for name in metrics)
    having = {name: [m[name] for m in found if name in m] for name in names}
    return {name: sum(values) / len(values) for name, values in having.items()}


class Totals:
    """Metrics summed over micro-batches: means over rows, or maxima where the name ends in `/max`.

    They stay where they were computed until `means`, so that no micro-batch waits for the one before.
    """

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.values: dict[str, list[Tensor]] = defaultdict(list)
        self.sums: list[tuple[list[str], int, Tensor]] = []
        """Names of columns, their length, and the sum of each in one tensor."""
        self.maxima: dict[str, Tensor] = {}
        self._columns: dict[str, Tensor] = {}

    def add(self, term: Part, value: Tensor, stats: Mapping[str, Tensor]) -> None:
        """What a term came to on a micro-batch, and columns it gave."""
        self.values[term.info.name].append(value)
        if self._columns.keys() & stats.keys():
            self._sum()
        self._columns |= stats

    def close(self, loss: Tensor, stats: Mapping[str, Tensor]) -> None:
        """The end of a micro-batch."""
        self.losses.append(loss)
        self._columns |= stats
        self._sum()

    def _sum(self) -> None:
        """Columns of one length and kind are summed in one operation."""
        alike: dict[tuple[int, torch.dtype], dict[str, Tensor]] = defaultdict(dict)
        for name, column in self._columns.items():
            if column.numel() == 0:
                continue
            if name.endswith("/max"):
                name = name.removesuffix("/max")
                most = column.max()
                self.maxima[name] = torch.maximum(self.maxima[name], most) if name in self.maxima else most
            else:
                alike[len(column), column.dtype][name] = column
        for (rows, kind), columns in alike.items():
            wide = torch.float64 if kind.is_floating_point else torch.int64
            total = torch.stack(list(columns.values())).sum(1, dtype=wide)
            self.sums.append((list(columns), rows, total))
        self._columns = {}

    def means(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for names, rows, totals in self.sums:
            for name, total in zip(names, totals.tolist(), strict=True):
                sums[name] += total
                counts[name] += rows
        means = {name: total / counts[name] for name, total in sums.items()}
        added = {name: sum(map(float, parts)) for name, parts in self.values.items()}
        maxima = {name: float(value) for name, value in self.maxima.items()}
        return {"loss": sum(map(float, self.losses)), **added, **maxima, **means}
