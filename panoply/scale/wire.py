"""Experience on its way between processes: flat arrays of NumPy, in which nothing is said twice.

Decisions come in *runs*: neighbours of one episode, and inside of it of one turn in one context. In a run most columns
do not change (task, group, version, …), the position counts up, a signal stands on the last decision, and the action
is the context's token at that place. Each column is sent in the shortest of these ways that gives it back exactly,
whole numbers in as few bytes as hold them, and the prompt of several answers once. An answer's token then takes its
log-probability, its entropy and itself: about 12 bytes, where the table in memory takes ten times that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from panoply.experience import Column, Experience, Ragged, Table, distinct

Array = NDArray[Any]
Packed = dict[str, Any]
"""Arrays, numbers and words by name; nothing else, so that anything can carry it."""
RUNS = {"episode": ("episode",), "turn": ("episode", "turn", "context")}
"""Two sizes of runs. Where one of these keys changes, one ends."""
NARROW = (np.int8, np.int16, np.int32)
VIEWED = {torch.bfloat16: torch.int16}
"""Kinds of numbers that NumPy has not, and as what they travel."""


def packed(experience: Experience) -> Packed:
    """All of it: decisions, contexts, pairs and lists."""
    context = experience.context
    found: Packed = {
        "decisions": _decisions(experience.decisions, context),
        "context": _plain(context) | _prompts(context),
    }
    for name, table in (("pairs", experience.pairs), ("lists", experience.lists)):
        if table is not None:
            found[name] = _plain(table)
    return found


def unpacked(found: Packed) -> Experience:
    context = _table(found["context"])
    decisions = _table(found["decisions"], context)
    pairs, lists = (_table(found[name]) if name in found else None for name in ("pairs", "lists"))
    return Experience(decisions, context, pairs, lists)


def packed_table(table: Table) -> Packed:
    return _plain(table)


def unpacked_table(found: Packed) -> Table:
    return _table(found)


def packed_weights(weights: Mapping[str, Tensor]) -> Packed:
    """Copies of tensors, which are free to change from then on."""
    return {name: _raw(weight.detach()) for name, weight in weights.items()}


def unpacked_weights(found: Packed) -> dict[str, Tensor]:
    return {name: _tensor(column) for name, column in found.items()}


def size(found: Any) -> int:
    """Bytes of all arrays in what is sent."""
    if isinstance(found, Mapping):
        return sum(size(value) for value in found.values())
    return int(found.nbytes) if isinstance(found, np.ndarray) else 0


# ------------------------------------------------------------------ a column


def _narrow(values: Array) -> Array:
    """Whole numbers in as few bytes as hold all of them."""
    if values.dtype != np.int64 or not values.size:
        return values
    low, high = values.min(), values.max()
    for kind in NARROW:
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return values.astype(kind)
    return values


def _array(column: Tensor) -> Array:
    column = column.detach().cpu().contiguous()
    found: Array = column.view(VIEWED.get(column.dtype, column.dtype)).numpy()
    return found


def _raw(column: Tensor) -> Packed:
    """A tensor as it is, copied."""
    return {"how": "each", "kind": str(column.dtype), "values": _array(column).copy()}


def _each(column: Column) -> Packed:
    if isinstance(column, Ragged):
        lengths = _narrow(_array(column.lengths))
        return {"how": "ragged", "lengths": lengths, "inside": _each(column.values)}
    return {"how": "each", "kind": str(column.dtype), "values": _narrow(_array(column)).copy()}


def tensor(values: Array) -> Tensor:
    """A tensor of an array, which may have come where it cannot be written to."""
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _tensor(found: Packed) -> Tensor:
    kind: torch.dtype = getattr(torch, found["kind"].removeprefix("torch."))
    values = tensor(found["values"])
    return values.view(kind) if kind in VIEWED else values.to(kind)


def _ragged(values: Tensor, lengths: Array) -> Ragged:
    return Ragged(values, torch.cat([torch.zeros(1, dtype=torch.long), tensor(lengths).long().cumsum(0)]))


# ------------------------------------------------------------------ decisions


class _Runs:
    """Where runs begin, and how long they are."""

    def __init__(self, lengths: Tensor):
        self.lengths, self.last = lengths, lengths.cumsum(0) - 1
        self.first = self.last - lengths + 1

    @classmethod
    def of(cls, decisions: Table, keys: Sequence[str]) -> _Runs:
        found = [decisions.tensor(name).cpu() for name in keys if name in decisions]
        begins = torch.ones(decisions.rows, dtype=torch.bool)
        if found and decisions.rows:
            changes = torch.stack([key[1:] != key[:-1] for key in found]).any(0)
            begins = torch.cat([begins[:1], changes])
        first = begins.nonzero().flatten()
        return cls(torch.cat([first, torch.tensor([decisions.rows])]).diff())

    @cached_property
    def of_row(self) -> Tensor:
        """The run that each row is in."""
        return torch.arange(len(self.lengths)).repeat_interleave(self.lengths)

    @cached_property
    def begins(self) -> Array:
        """Of each row, the first row of its run."""
        found: Array = self.first[self.of_row].numpy()
        return found

    @cached_property
    def before_last(self) -> Array:
        """Whether another row of its run follows a row."""
        found = np.ones(len(self.of_row), dtype=bool)
        found[self.last.numpy()] = False
        return found

    def spread(self, values: Tensor) -> Tensor:
        return values[self.of_row]

    def counted(self, values: Tensor) -> Tensor:
        return self.spread(values - self.first) + torch.arange(len(self.of_row))

    def on_last(self, values: Tensor) -> Tensor:
        found = values.new_zeros(int(self.lengths.sum()), *values.shape[1:])
        found[self.last] = values
        return found


def _decisions(decisions: Table, context: Table) -> Packed:
    runs = {size: _Runs.of(decisions, keys) for size, keys in RUNS.items()}
    said = _said(decisions, context)
    columns: Packed = {}
    for name, column in decisions.items():
        if isinstance(column, Ragged):
            columns[name] = _each(column)
        elif name == "action" and said is not None and torch.equal(said, column.cpu()):
            columns[name] = {"how": "said"}
        else:
            columns[name] = _shortest(column.cpu(), runs)
    lengths = {size: _narrow(one.lengths.numpy()) for size, one in runs.items()}
    return {"rows": decisions.rows, "runs": lengths, "columns": columns}


def _shortest(column: Tensor, runs: Mapping[str, _Runs]) -> Packed:
    """By the first of the ways that gives back every bit: what is not a number equals itself, and −0 is not 0."""
    bits = _bits(column)
    counting = bits - np.arange(len(bits)) if column.dtype == torch.long and column.ndim == 1 else None
    for size, run in runs.items():
        if _constant(bits, run):
            how, at = "same", run.first
        elif not bits[run.before_last].any():
            how, at = "last", run.last
        elif counting is not None and _constant(counting, run):
            how, at = "count", run.first
        else:
            continue
        return {**_each(column[at]), "how": how, "run": size}
    return _each(column)


def _constant(bits: Array, run: _Runs) -> bool:
    """Whether every row is as the first of its run."""
    return bool((bits[run.begins] == bits).all())


def _bits(column: Tensor) -> Array:
    """A column as whole numbers, a row each."""
    found = _array(column)
    flat: Array = found.reshape(len(found), math.prod(found.shape[1:])).view(f"i{found.itemsize}")
    return flat[:, 0] if column.ndim == 1 else flat


def _said(decisions: Table, context: Table) -> Tensor | None:
    """The tokens that stand where decisions say they are taken."""
    if (
        "tokens" not in context
        or not {"context", "position", "action"} <= set(decisions)
        or not decisions.rows
    ):
        return None
    tokens = context.ragged("tokens")
    place = tokens.offsets.cpu()[decisions.tensor("context").cpu()] + decisions.tensor("position").cpu()
    if bool((place < 0).any() | (place >= len(tokens.values)).any()):
        return None
    return tokens.values.cpu()[place]


# ------------------------------------------------------------------ tables


def _plain(table: Table) -> Packed:
    return {"rows": table.rows, "columns": {name: _each(column) for name, column in table.items()}}


def _prompts(context: Table) -> Packed:
    """In place of the tokens of a context: its prompts, each once, and what follows them."""
    if not {"tokens", "prompt", "shared"} <= set(context) or not context.rows:
        return {}
    tokens, shared = context.ragged("tokens").to("cpu"), context.tensor("shared").cpu()
    if bool((shared > tokens.lengths).any()):
        return {}
    numbers, index = distinct(context.tensor("prompt").cpu())
    one = torch.empty(len(numbers), dtype=torch.long).index_copy(0, index, torch.arange(len(index)))
    heads = _cut(tokens, torch.zeros_like(shared), shared)
    kept = heads.take(one)
    again = kept.take(index)
    if not (torch.equal(again.offsets, heads.offsets) and torch.equal(again.values, heads.values)):
        return {}  # rows of one number differ in what they share: sent as they are
    tails = _cut(tokens, shared, tokens.lengths - shared)
    columns = {name: _each(column) for name, column in context.items()}
    columns["tokens"] = {"how": "prompts", "heads": _each(kept), "tails": _each(tails)}
    return {"columns": columns}


def _cut(tokens: Ragged, first: Tensor, lengths: Tensor) -> Ragged:
    """So many of each row's values, from `first` on."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    start = (tokens.offsets[:-1] + first - offsets[:-1]).repeat_interleave(lengths)
    return Ragged(tokens.values[start + torch.arange(len(start))], offsets)


def _table(found: Packed, context: Table | None = None) -> Table:
    runs = {size: _Runs(tensor(n).long()) for size, n in found.get("runs", {}).items()}
    columns: dict[str, Column] = {}
    for name, column in found["columns"].items():
        how = column["how"]
        if how == "ragged":
            columns[name] = _ragged(_tensor(column["inside"]), column["lengths"])
        elif how == "each":
            columns[name] = _tensor(column)
        elif how not in ("prompts", "said"):
            run = runs[column["run"]]
            back = {"same": run.spread, "last": run.on_last, "count": run.counted}[how]
            columns[name] = back(_tensor(column))
    named = found["columns"]
    if named.get("tokens", {}).get("how") == "prompts":
        columns["tokens"] = _joined(named["tokens"], columns["prompt"])
    if named.get("action", {}).get("how") == "said":
        assert context is not None
        said = _said(Table({**columns, "action": columns["position"]}), context)
        assert said is not None
        columns["action"] = said
    return Table({name: columns[name] for name in named})


def _joined(found: Packed, prompt: Column) -> Ragged:
    heads, tails = (_ragged(_tensor(found[n]["inside"]), found[n]["lengths"]) for n in ("heads", "tails"))
    assert isinstance(prompt, Tensor)
    index = distinct(prompt)[1]
    begun = heads.take(index)
    offsets = begun.offsets + tails.offsets
    values = torch.empty(int(offsets[-1]), dtype=tails.values.dtype)
    for part, shift in ((begun, torch.zeros_like(begun.lengths)), (tails, begun.lengths)):
        start = (offsets[:-1] + shift - part.offsets[:-1]).repeat_interleave(part.lengths)
        values[start + torch.arange(len(start))] = part.values
    return Ragged(values, offsets)
