"""Experience: the flat table of decisions, what they were taken in, and segment operations over its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from panoply.errors import unknown

OWN, TEACHER, DEMONSTRATION, REPLAY, SYNTHETIC = range(5)
"""Values of the `source` column."""
OPEN, TERMINATED, TRUNCATED = range(3)
"""Values of the `end` column."""
STREAMS: dict[str, tuple[int, ...]] = {
    "own": (OWN, REPLAY),
    "imitation": (TEACHER, DEMONSTRATION),
    "synthetic": (SYNTHETIC,),
    "joint": (OWN, REPLAY, TEACHER),
}
"""Streams are normalised apart, each by its own count, and then mixed. `joint` is the exception: own and teacher's rows
divided by one count, as methods want it that put a teacher's answer into a group of the policy's own."""

KeyUnit = Literal["turn", "segment", "episode", "parent", "step", "game", "group", "task", "domain", "agent"]
"""Keys a term may be of: what one of its values belongs to."""
KEY_UNITS: tuple[KeyUnit, ...] = get_args(KeyUnit)
Unit = Literal["decision", KeyUnit, "pair", "list", "batch", "transition"]
KEYS = {*KEY_UNITS, "state", "context", "next", "source", "train"}
"""Columns that say what belongs together."""
COMMON_KEYS: tuple[KeyUnit, ...] = ("turn", "episode", "group", "task")
"""Keys that all decisions have; others are there where a world or a part gives them."""
INSIDE: dict[str, tuple[str, ...]] = {
    "turn": ("episode",),
    "segment": ("episode",),
    "step": ("game", "episode"),
}
"""Keys that count from 0 inside something larger: the first of these that there is."""


def plural(unit: str) -> str:
    """Several units in words."""
    return "batches" if unit == "batch" else f"{unit}s"


def moved(x: Tensor, device: torch.device | str) -> Tensor:
    """On another device; to a GPU by way of pinned memory, so that nobody waits for what it is doing."""
    if x.device.type == "cpu" and torch.device(device).type == "cuda":
        return x.contiguous().pin_memory().to(device, non_blocking=True)
    return x.to(device)


def distinct(key: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending distinct values, and each row's place among them. Keys mostly are in order; those are not sorted."""
    if bool((key[1:] >= key[:-1]).all()):
        values, place = torch.unique_consecutive(key, return_inverse=True)
    else:
        values, place = torch.unique(key, return_inverse=True)
    return values, place


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

    def take(self, rows: Tensor) -> Ragged:
        lengths = self.lengths[rows]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        start = (self.offsets[rows] - offsets[:-1]).repeat_interleave(lengths)
        return Ragged(self.values[start + torch.arange(len(start), device=start.device)], offsets)

    def padded(self, values: Tensor, empty: float) -> Tensor:
        """Other values for the same places, [rows, longest], with `empty` after the end of a row."""
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
        """The same rows with more columns, or other ones."""
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
        """Some rows, by index. Columns are gathered when they are first asked for."""
        return _Taken(self, rows)

    def to(self, device: torch.device | str) -> Table:
        moving = ((k, c.to(device) if isinstance(c, Ragged) else moved(c, device)) for k, c in self.items())
        return Table(dict(moving))

    @staticmethod
    def cat(tables: Sequence[Table]) -> Table:
        """Stack tables. A column that only some of them have cannot be stacked: absent is not zero."""
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


class _Taken(Table):
    """Rows of another table. Of a mini-batch a few columns are looked at, and only those are gathered."""

    def __init__(self, source: Table, at: Tensor, columns: Mapping[str, Column] | None = None):
        self._source, self._at, self.rows = source, at, len(at)
        self._columns = dict(columns or {})

    def __getitem__(self, name: str) -> Column:
        if name not in self._columns:
            whole = self._source[name]
            self._columns[name] = whole.take(self._at) if isinstance(whole, Ragged) else whole[self._at]
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
        return _Taken(self._source, self._at, {**self._columns, **self._checked(columns)})


class Segments:
    """Rows sharing a key. Reductions give one value a segment; `rows` spreads those back over the rows."""

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
        """Whether a segment holds one value only: exact equality, never `std > eps`."""
        return self.max(x) == self.min(x)

    def first(self, x: Tensor) -> Tensor:
        """Each segment's first row. For columns that do not vary inside a segment, its value."""
        return x[self._row(first=True)]

    def last(self, x: Tensor) -> Tensor:
        return x[self._row(first=False)]

    def is_last(self) -> Tensor:
        """Marks each segment's last row."""
        mark = torch.zeros(len(self.index), dtype=torch.bool, device=self.index.device)
        mark[self._row(first=False)] = True
        return mark

    def grid(self) -> Tensor:
        """Row numbers [segments, longest], each segment's rows in order, −1 after its end."""
        order = self.index.argsort(stable=True)
        within = (
            torch.arange(len(order), device=order.device)
            - (self.count.cumsum(0) - self.count)[self.index[order]]
        )
        grid = torch.full((len(self), int(self.count.max())), -1, device=order.device)
        grid[self.index[order], within] = order
        return grid

    def following(self, x: Tensor, last: Tensor) -> Tensor:
        """Each row's successor's x inside its segment; for the last one its own value of `last`."""
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
    """Each row's segment mean."""
    segments = Segments(by)
    return segments.rows(segments.mean(x))


@dataclass(frozen=True)
class Experience:
    """Decisions, the context they were taken in, and pairs or ranked lists of episodes where there are any."""

    decisions: Table
    context: Table
    pairs: Table | None = None
    lists: Table | None = None
    _segments: dict[str, Segments] = field(default_factory=dict, repr=False, compare=False)
    _whole: set[str] = field(default_factory=set, repr=False, compare=False)
    """Streams known to hold all the decisions; so they do in any selection of these."""
    _looked_up: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.decisions.tensor(name)

    def __contains__(self, name: str) -> bool:
        return name in self.decisions

    def __len__(self) -> int:
        return self.decisions.rows

    def by(self, key: str) -> Segments:
        """Segments of the decisions that share a value of `key`; a turn is one of its episode's (see `INSIDE`)."""
        if key not in self._segments:
            value = self[key]
            owner = next((owner for owner in INSIDE.get(key, ()) if owner in self), None)
            if owner is not None:
                inside = Segments(value)
                value = self.by(owner).index * len(inside) + inside.index
            self._segments[key] = Segments(value)
        return self._segments[key]

    def with_columns(self, **columns: Column) -> Experience:
        """The same rows with columns added or replaced (write `logp@x` as `**{"logp@x": …}`)."""
        decisions = self.decisions.plus(columns)
        if columns.keys() & KEYS:
            return Experience(decisions, self.context, self.pairs, self.lists)
        known = (self._segments, self._whole, self._looked_up)  # what is known of the rows stays true
        return Experience(decisions, self.context, self.pairs, self.lists, *known)

    def without(self, *names: str) -> Experience:
        """The same rows with columns left out."""
        kept = {name: column for name, column in self.decisions.items() if name not in names}
        return Experience(Table(kept), self.context, self.pairs, self.lists)

    @property
    def altered(self) -> bool:
        """Whether a temperature or a cut (top-k, top-p, a mask) made the distribution drawn from another one."""
        return "temperature" in self or "allowed" in self

    def unaltered(self) -> Experience:
        """The same decisions as the policy itself would take them: at temperature 1, with nothing cut off."""
        return self.without("temperature", "allowed") if self.altered else self

    def with_pairs(self, pairs: Table) -> Experience:
        return Experience(self.decisions, self.context, pairs, self.lists)

    def with_lists(self, lists: Table) -> Experience:
        """The same rows with ranked lists: `episodes`, a ragged column of episode numbers, the best first."""
        return Experience(self.decisions, self.context, self.pairs, lists)

    def take(self, rows: Tensor) -> Experience:
        """Some decisions, by mask or index, with the sequences they need and the pairs and lists that are whole.

        Observations stay where they are: they are looked up, so those that nobody refers to cost nothing.
        """
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
        decisions = self.decisions.take(rows)
        pairs = None if self.pairs is None else _whole(self.pairs, decisions.tensor("episode"))
        lists = None if self.lists is None else _whole(self.lists, decisions.tensor("episode"))
        if "tokens" not in self.context:
            return Experience(decisions, self.context, pairs, lists, _whole=set(self._whole))
        used, renumbered = distinct(decisions.tensor("context"))
        taken = decisions.plus({"context": renumbered})
        return Experience(taken, self.context.take(used), pairs, lists, _whole=set(self._whole))

    def reprompted(self, prompts: Mapping[int, Sequence[int]]) -> Experience:
        """The same answers after other prompts, by row of the context table; rows that are not named keep theirs.

        What a policy said of the decisions is gone (`logp`, `entropy`, all columns `…@SNAPSHOT`): it was said after the
        old prompt, and a ratio would be of two different contexts. Score them again, and divide by `logp@old`.
        """
        tokens, shared = self.context.ragged("tokens").tolist(), self.context.tensor("shared").tolist()
        number = self.context.tensor("prompt").tolist()
        known = {tuple(row[:n]): p for row, n, p in zip(tokens, shared, number, strict=True)}
        next_number = max(number, default=-1) + 1
        for row, prompt in prompts.items():
            tokens[row], shared[row] = [*prompt, *tokens[row][shared[row] :]], len(prompt)
            number[row] = known.setdefault(tuple(prompt), next_number)
            next_number = max(next_number, number[row] + 1)
        lengths, place = torch.tensor(shared), self["context"]
        moved = self["position"] + (lengths - self.context.tensor("shared"))[place]
        told = [n for n in self.decisions if n in ("logp", "entropy", "answer_likelihood") or "@" in n]
        kept = self.without(*told).decisions.plus({"position": moved})
        said: dict[str, Column] = {
            "tokens": Ragged.from_lists(tokens), "prompt": torch.tensor(number), "shared": lengths
        }  # fmt: skip
        return Experience(kept, self.context.plus(said), self.pairs, self.lists)

    def looked_up(self, name: str, by: str = "context") -> Tensor:
        """A context column on the decisions: what each was taken in, or with `by="next"` what came after it."""
        key = f"{name}@{by}"
        if key not in self._looked_up:
            self._looked_up[key] = self.context.tensor(name)[self[by]]
        return self._looked_up[key]

    def holds_all(self, name: str) -> bool:
        """Whether every decision is one of this stream that learns."""
        if name not in self._whole and bool(self.stream(name).all()):
            self._whole.add(name)
        return name in self._whole

    def stream(self, name: str) -> Tensor:
        """Marks the decisions of a stream that learn."""
        mask = torch.ones(len(self), dtype=torch.bool, device=self["action"].device)
        if name in self._whole:
            return mask
        if "source" in self:
            sources = torch.tensor(STREAMS[name], device=mask.device)
            mask = torch.isin(self["source"], sources)
        return mask & self["train"].bool() if "train" in self else mask

    def to(self, device: torch.device | str) -> Experience:
        pairs = None if self.pairs is None else self.pairs.to(device)
        lists = None if self.lists is None else self.lists.to(device)
        return Experience(self.decisions.to(device), self.context.to(device), pairs, lists)

    @staticmethod
    def mix(parts: Sequence[Experience]) -> Experience:
        """Stack experiences of different streams. A number that some of them lack is NaN there, never zero.

        So a term that looks at rows that are not of its stream is found out at once.
        """
        names = dict.fromkeys(name for p in parts for name in p.decisions)
        kinds = {name: next(p.decisions[name] for p in parts if name in p) for name in names}
        filled = []
        for p in parts:
            absent: dict[str, Column] = {}
            for name in (n for n in names if n not in p):
                kind = kinds[name]
                if isinstance(kind, Ragged):
                    absent[name] = Ragged(kind.values[:0], torch.zeros(len(p) + 1, dtype=torch.long))
                elif kind.is_floating_point():
                    empty = 1.0 if name == "temperature" else torch.nan
                    absent[name] = torch.full((len(p),), empty, dtype=kind.dtype)
                else:
                    raise ValueError(f"column '{name}' is missing from some rows and has no number for that")
            filled.append(p.with_columns(**absent))
        return Experience.cat(filled)

    @staticmethod
    def cat(parts: Sequence[Experience]) -> Experience:
        """Stack experiences. Keys are taken as they are: whoever made them made them unique.

        References between tables are moved along: `context` and `next`, and `prompt`, which says what contexts share.
        """
        decisions, contexts, rows, prompts = [], [], 0, 0
        for p in parts:
            references = {name: p[name] + rows for name in ("context", "next") if name in p}
            decisions.append(p.decisions.plus(references))
            rows += p.context.rows
            context = p.context
            if "prompt" in context and context.rows:
                context = context.plus({"prompt": context.tensor("prompt") + prompts})
                prompts = int(context.tensor("prompt").max()) + 1
            contexts.append(context)
        pairs = [p.pairs for p in parts if p.pairs is not None]
        lists = [p.lists for p in parts if p.lists is not None]
        return Experience(
            Table.cat(decisions),
            Table.cat(contexts),
            Table.cat(pairs) if pairs else None,
            Table.cat(lists) if lists else None,
        )


def _whole(compared: Table, episodes: Tensor) -> Table:
    """The pairs or lists all of whose episodes are among these."""
    if "episodes" in compared:
        members = compared.ragged("episodes")
        row = torch.arange(len(members), device=members.values.device).repeat_interleave(members.lengths)
        kept = torch.ones(len(members), dtype=torch.bool, device=row.device)
        kept[row[~torch.isin(members.values, episodes)]] = False
    else:
        kept = torch.isin(compared.tensor("chosen"), episodes) & torch.isin(
            compared.tensor("rejected"), episodes
        )
    return compared.take(kept.nonzero().flatten())


def transcript(experience: Experience, episode: int) -> tuple[list[int], list[int]]:
    """An episode's tokens, the contexts of its turns one after another, and where in them its decisions are."""
    mask = experience["episode"] == episode
    context, position = experience["context"][mask], experience["position"][mask]
    tokens = experience.context.ragged("tokens")
    starts: dict[int, int] = {}
    text: list[int] = []
    for c in context.tolist():
        if c not in starts:
            starts[c] = len(text)
            text += tokens[c].tolist()
    return text, [starts[c] + at for c, at in zip(context.tolist(), position.tolist(), strict=True)]
