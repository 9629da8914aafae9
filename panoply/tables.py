"""Tables: named columns of equal length, columns whose rows differ in length, and sums over rows that share a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from panoply.errors import unknown


def moved(x: Tensor, device: torch.device | str) -> Tensor:
    """A tensor on another device. To a GPU it goes through pinned memory, so that the CPU need not wait for the GPU."""
    if x.device.type == "cpu" and torch.device(device).type == "cuda":
        return x.contiguous().pin_memory().to(device, non_blocking=True)
    return x.to(device)


def picked(x: Tensor, at: Tensor) -> Tensor:
    """x[at], for numbers of rows `at`: on a CPU in a quarter of the time that brackets take."""
    return x.index_select(0, at) if at.device.type == "cpu" and x.device.type == "cpu" else x[at]


def distinct(key: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct values in ascending order, and each row's place among them."""
    return _distinct(key, in_order(key))


def _distinct(key: Tensor, ordered: bool) -> tuple[Tensor, Tensor]:
    """Keys in order are not sorted again."""
    if ordered:
        values, place = torch.unique_consecutive(key, return_inverse=True)
    else:
        values, place = torch.unique(key, return_inverse=True)
    return values, place


def in_order(key: Tensor) -> bool:
    return bool((key[1:] >= key[:-1]).all())


@dataclass(frozen=True)
class Ragged:
    """Rows of unequal length: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: Tensor
    offsets: Tensor

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.long) -> Ragged:
        lengths = torch.tensor([0, *(len(r) for r in rows)])
        return cls(torch.tensor([x for r in rows for x in r], dtype=dtype), lengths.cumsum(0))

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Tensor:
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def take(self, rows: Tensor | slice) -> Ragged:
        if isinstance(rows, slice):
            offsets = self.offsets[rows.start : rows.stop + 1]
            return Ragged(self.values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
        lengths = self.lengths[rows]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        start = (self.offsets[rows] - offsets[:-1]).repeat_interleave(lengths)
        return Ragged(picked(self.values, start + torch.arange(len(start), device=start.device)), offsets)

    def padded(self, values: Tensor, empty: float) -> Tensor:
        """A grid [rows, longest] of `values`, one for each of the own ones, with `empty` after the end of a row."""
        row = torch.arange(len(self), device=values.device).repeat_interleave(self.lengths)
        place = torch.arange(len(row), device=values.device) - self.offsets[:-1][row]
        grid = values.new_full((len(self), int(self.lengths.max())), empty)
        return grid.index_put((row, place), values)

    def tolist(self) -> list[list[int]]:
        values, offsets = self.values.tolist(), self.offsets.tolist()
        return [values[a:b] for a, b in pairwise(offsets)]

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(moved(self.values, device), moved(self.offsets, device))

    @staticmethod
    def cat(parts: Sequence[Ragged]) -> Ragged:
        ends = torch.tensor([0, *(len(p.values) for p in parts[:-1])]).cumsum(0)
        offsets = [p.offsets[1:] + end for p, end in zip(parts, ends.tolist(), strict=True)]
        first = parts[0].offsets[:1]
        return Ragged(torch.cat([p.values for p in parts]), torch.cat([first, *offsets]))


Column = Tensor | Ragged


class Table(Mapping[str, Column]):
    """Named columns of equal length. Immutable: every change gives a new table."""

    def __init__(self, columns: Mapping[str, Column]):
        self._columns = dict(columns)
        lengths = {name: len(column) for name, column in self._columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"columns differ in length: {lengths}")
        self.rows = next(iter(lengths.values()), 0)

    def __getitem__(self, name: str) -> Column:
        if name not in self._columns:
            raise unknown("column", name, self._columns)
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Table({self.rows} rows: {', '.join(self._columns)})"

    def tensor(self, name: str) -> Tensor:
        column = self[name]
        assert isinstance(column, Tensor), f"column '{name}' is ragged"
        return column

    def ragged(self, name: str) -> Ragged:
        column = self[name]
        assert isinstance(column, Ragged), f"column '{name}' is not ragged"
        return column

    def plus(self, columns: Mapping[str, Column]) -> Table:
        """The same rows with columns added or replaced."""
        if not self._columns:
            return Table(columns)
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._columns = {**self._columns, **self._checked(columns)}
        return made

    def _checked(self, columns: Mapping[str, Column]) -> Mapping[str, Column]:
        for name, column in columns.items():
            if len(column) != self.rows:
                raise ValueError(
                    f"columns differ in length: {name} has {len(column)}, the others {self.rows}"
                )
        return columns

    def take(self, rows: Tensor) -> Table:
        """Some rows, by index. A column is gathered when it is first asked for; of rows in a row it is a view."""
        at = _span(rows)

        def some(whole: Column) -> Column:
            if isinstance(whole, Ragged):
                return whole.take(at)
            return whole[at] if isinstance(at, slice) else picked(whole, at)

        return _Later(self, len(rows), some)

    def to(self, device: torch.device | str) -> Table:
        """The same on another device. To a GPU a column is moved when it is first asked for there."""

        def there(column: Column) -> Column:
            return column.to(device) if isinstance(column, Ragged) else moved(column, device)

        if torch.device(device).type == "cuda":
            return _Later(self, self.rows, there)
        return Table({name: there(column) for name, column in self.items()})

    @staticmethod
    def cat(tables: Sequence[Table]) -> Table:
        """Tables of the same columns, one below the other. A column that one lacks is an error: absent is not zero."""
        names = list(tables[0])
        for table in tables[1:]:
            if set(table) != set(names):
                differing = sorted(set(table) ^ set(names))
                raise ValueError(f"tables to stack differ in columns: {differing}")
        stacked: dict[str, Column] = {}
        for name in names:
            columns = [t[name] for t in tables]
            if isinstance(columns[0], Ragged):
                stacked[name] = Ragged.cat([t.ragged(name) for t in tables])
            else:
                stacked[name] = torch.cat([t.tensor(name) for t in tables])
        return Table(stacked)


class _Later(Table):
    """Another table's columns, each changed when it is first asked for: of a mini-batch only a few are looked at."""

    def __init__(
        self,
        source: Table,
        rows: int,
        change: Callable[[Column], Column],
        columns: Mapping[str, Column] | None = None,
    ):
        self._source, self.rows, self._change = source, rows, change
        self._columns = dict(columns or {})

    def __getitem__(self, name: str) -> Column:
        if name not in self._columns:
            self._columns[name] = self._change(self._source[name])
        return self._columns[name]

    def __contains__(self, name: object) -> bool:
        return name in self._columns or name in self._source

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._source, *self._columns)))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"Table({self.rows} rows: {', '.join(self)})"

    def plus(self, columns: Mapping[str, Column]) -> Table:
        return _Later(self._source, self.rows, self._change, {**self._columns, **self._checked(columns)})


def _span(rows: Tensor) -> Tensor | slice:
    """Row numbers on the host that follow one another, as a slice."""
    if rows.device.type != "cpu" or not len(rows):
        return rows
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 != len(rows) or not bool((rows.diff() == 1).all()):
        return rows
    return slice(first, last + 1)


# ------------------------------------------------------------------ rows that share a key


class Segments:
    """A segment is all rows that share a key. `mean` and others give a value a segment, `rows` puts it on its rows."""

    def __init__(self, key: Tensor):
        self.keys: Tensor
        self.index: Tensor
        self._ordered = in_order(key)
        self.keys, self.index = _distinct(key, self._ordered)
        self.count = self.index.bincount(minlength=len(self.keys))

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, per_segment: Tensor) -> Tensor:
        return picked(per_segment, self.index)

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
        if self._ordered:
            after = self.count.cumsum(0)
            return after - self.count if first else after - 1
        at = torch.arange(len(self.index), device=self.index.device)
        return self.min(at) if first else self.max(at)


def segment_mean(x: Tensor, by: Tensor) -> Tensor:
    """For each row the mean over all rows that share its value of `by`."""
    segments = Segments(by)
    return segments.rows(segments.mean(x))
