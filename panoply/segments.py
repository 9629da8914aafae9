"""Segments: sums, means and the like over all rows that share a key, without a Python loop over rows."""

from __future__ import annotations

import torch
from torch import Tensor

from panoply.tables import distinct


class Segments:
    """A segment is all rows that share a key. `mean` and others give a value a segment, `rows` puts it on its rows."""

    def __init__(self, key: Tensor):
        self.keys: Tensor
        self.index: Tensor
        self.keys, self.index = distinct(key)
        self.count = self.index.bincount(minlength=len(self.keys))

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, per_segment: Tensor) -> Tensor:
        return per_segment[self.index]

    def sum(self, x: Tensor) -> Tensor:
        x = x if x.is_floating_point() else x.long()
        return x.new_zeros(len(self), *x.shape[1:]).index_add(0, self.index, x)

    def mean(self, x: Tensor) -> Tensor:
        x = x if x.is_floating_point() else x.float()
        return self.sum(x) / self.count.to(x.dtype)

    def var(self, x: Tensor, correction: int = 1) -> Tensor:
        """Zero where a segment has `correction` rows or fewer."""
        centred = x - self.rows(self.mean(x))
        return self.sum(centred**2) / (self.count - correction).clamp(min=1).to(x.dtype)

    def std(self, x: Tensor, correction: int = 1) -> Tensor:
        return self.var(x, correction).sqrt()

    def max(self, x: Tensor) -> Tensor:
        return self._extreme(x, "amax")

    def min(self, x: Tensor) -> Tensor:
        return self._extreme(x, "amin")

    def _extreme(self, x: Tensor, kind: str) -> Tensor:
        return x.new_empty(len(self)).scatter_reduce(0, self.index, x, kind, include_self=False)

    def median(self, x: Tensor) -> Tensor:
        """The middle value, or the mean of the two in the middle."""
        order = x.argsort(stable=True)
        order = order[self.index[order].argsort(stable=True)]
        start = self.count.cumsum(0) - self.count
        ordered = x[order]
        low, high = start + (self.count - 1) // 2, start + self.count // 2
        return (ordered[low] + ordered[high]) / 2

    def constant(self, x: Tensor) -> Tensor:
        """Whether all values of a segment are equal, exactly: `std > eps` would take nearly equal ones for equal."""
        return self.max(x) == self.min(x)

    def first(self, x: Tensor) -> Tensor:
        """The value in each segment's first row; of a column that is constant inside segments, its value."""
        return x[self._row(first=True)]

    def last(self, x: Tensor) -> Tensor:
        return x[self._row(first=False)]

    def is_last(self) -> Tensor:
        """A mask of the rows that are the last of their segment."""
        mark = torch.zeros(len(self.index), dtype=torch.bool, device=self.index.device)
        mark[self._row(first=False)] = True
        return mark

    def grid(self) -> Tensor:
        """Row numbers [segments, longest]: each segment's rows in their order, then −1."""
        order = self.index.argsort(stable=True)
        within = (
            torch.arange(len(order), device=order.device)
            - (self.count.cumsum(0) - self.count)[self.index[order]]
        )
        grid = torch.full((len(self), int(self.count.max())), -1, device=order.device)
        grid[self.index[order], within] = order
        return grid

    def following(self, x: Tensor, last: Tensor) -> Tensor:
        """For each row the x of the next row of its segment; a segment's last row has none and gets its own `last`."""
        order = self.index.argsort(stable=True)
        after = last.clone()
        inside = self.index[order[1:]] == self.index[order[:-1]]
        after[order[:-1][inside]] = x[order[1:][inside]]
        return after

    def to_go(self, x: Tensor, factor: float | Tensor) -> Tensor:
        """y_t = x_t + factor_t·y_{t+1} inside each segment, whose rows are in the order they happened.

        One pass over time for all segments at once, in NumPy: its small operations cost a fifth of torch's.
        """
        rows = self.grid().T
        padded = torch.cat([x, x.new_zeros(1)])[rows].cpu().numpy()
        each = (
            factor.cpu().numpy()[rows.cpu().numpy()] if isinstance(factor, Tensor) else [factor] * len(padded)
        )
        for t in range(len(padded) - 2, -1, -1):
            padded[t] += each[t] * padded[t + 1]
        found, inside = torch.empty_like(x), rows >= 0
        found[rows[inside]] = torch.from_numpy(padded).to(x.device)[inside]
        return found

    def _row(self, *, first: bool) -> Tensor:
        at = torch.arange(len(self.index), device=self.index.device)
        return self.min(at) if first else self.max(at)


def segment_mean(x: Tensor, by: Tensor) -> Tensor:
    """For each row the mean over all rows that share its value of `by`."""
    segments = Segments(by)
    return segments.rows(segments.mean(x))
