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
        self.loss: Tensor | float = 0.0
        self.values: dict[str, Tensor | float] = defaultdict(float)
        self.sums: dict[str, Tensor | float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self.maxima: dict[str, Tensor] = {}

    def add(self, term: Part, value: Tensor, stats: Mapping[str, Tensor]) -> None:
        self.values[term.info.name] += value.double()
        self.add_stats(stats)

    def add_stats(self, stats: Mapping[str, Tensor]) -> None:
        for name, column in stats.items():
            if len(column) == 0:
                continue
            if name.endswith("/max"):
                name = name.removesuffix("/max")
                most = column.max()
                self.maxima[name] = torch.maximum(self.maxima.get(name, most), most)
            else:
                self.sums[name] += column.double().sum()
                self.counts[name] += len(column)

    def means(self) -> dict[str, float]:
        means = {name: float(total) / self.counts[name] for name, total in self.sums.items()}
        plain = {name: float(value) for name, value in {**self.values, **self.maxima}.items()}
        return {"loss": float(self.loss), **plain, **means}
