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
        self.sums: list[tuple[list[str], int, Tensor]] = []
        """Names of columns, their length, and the sum of each in one tensor."""
        self.maxima: dict[str, Tensor] = {}

    def add(self, term: Part, value: Tensor, stats: Mapping[str, Tensor]) -> None:
        self.values[term.info.name] += value.double()
        self.add_stats(stats)

    def add_stats(self, stats: Mapping[str, Tensor]) -> None:
        alike: dict[tuple[int, torch.dtype], dict[str, Tensor]] = defaultdict(dict)
        for name, column in stats.items():
            if column.numel() == 0:
                continue
            if name.endswith("/max"):
                name = name.removesuffix("/max")
                most = column.max()
                self.maxima[name] = torch.maximum(self.maxima[name], most) if name in self.maxima else most
            else:
                column = column if column.is_floating_point() else column.float()
                alike[len(column), column.dtype][name] = column
        for (rows, _), columns in alike.items():
            total = torch.stack(list(columns.values())).sum(1, dtype=torch.float64)
            self.sums.append((list(columns), rows, total))

    def means(self) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for names, rows, totals in self.sums:
            for name, total in zip(names, totals.tolist(), strict=True):
                sums[name] += total
                counts[name] += rows
        means = {name: total / counts[name] for name, total in sums.items()}
        plain = {name: float(value) for name, value in {**self.values, **self.maxima}.items()}
        return {"loss": float(self.loss), **plain, **means}
