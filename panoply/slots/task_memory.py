"""What a part remembers of every task, from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.experience import Column, Ragged

Otherwise = float | int | Sequence[int]
"""What is said of a task that nothing was written of: a number, or a row such as `()`."""


@dataclass(frozen=True)
class TaskMemory:
    """Columns by task id. Never changed: `write` gives another one, which shares what is the same.

        memory = TaskMemory.of(state)
        tried = memory.look(ids, tried=0.0)["tried"]
        return memory.write(ids, tried=tried + 1).state(), result

    A column has rows for the tasks that it was written for, whichever those of other columns are. Other whole numbers
    than task ids will do as well (`state`, `group`).
    """

    columns: Mapping[str, tuple[Tensor, Column]] = field(default_factory=dict)
    """Of each column the ids, ascending, and a row for each."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> TaskMemory:
        """The memory in a part's state, where `state()` has put it; an empty one in the first."""
        columns: dict[str, tuple[Tensor, Column]] = {}
        for name in (n.removesuffix("@task") for n in state if n.endswith("@task")):
            offsets = state.get(f"{name}@offsets")
            held = state[name] if offsets is None else Ragged(state[name], offsets)
            columns[name] = (state[f"{name}@task"], held)
        return cls(columns)

    def state(self) -> dict[str, Tensor]:
        """As tensors by name, which a run saves; other things that a part remembers may stand beside them."""
        found: dict[str, Tensor] = {}
        for name, (ids, held) in self.columns.items():
            found[f"{name}@task"] = ids
            if isinstance(held, Ragged):
                found |= {name: held.values, f"{name}@offsets": held.offsets}
            else:
                found[name] = held
        return found

    def look(self, ids: Tensor, **otherwise: Otherwise) -> dict[str, Any]:
        """The named columns, a row for each id; what was never written is as the keyword says."""
        return {name: self._looked(name, ids, value) for name, value in otherwise.items()}

    def _looked(self, name: str, ids: Tensor, otherwise: Otherwise) -> Column:
        lists = isinstance(otherwise, Sequence)
        missing = (
            Ragged.from_lists([otherwise]) if isinstance(otherwise, Sequence) else torch.tensor([otherwise])
        )
        known, held = self.columns.get(name, (ids[:0], _rows(missing, ids[:0])))
        if lists != isinstance(held, Ragged):
            raise PanoplyError(
                f"The column '{name}' of a memory holds {'numbers' if lists else 'lists'}, so what it says of an "
                f"unknown task cannot be {otherwise!r}."
            )
        place = torch.searchsorted(known, ids)
        padded = torch.cat([known, known.new_full((1,), -1)])  # no id is negative
        return _rows(_stacked(held, missing), torch.where(padded[place] == ids, place, len(known)))

    def write(self, ids: Tensor, **columns: Column) -> TaskMemory:
        """With these rows, in the place of what was known of the same tasks; each id stands in `ids` once."""
        if len(torch.unique(ids)) < len(ids):
            raise PanoplyError(
                "A memory keeps one row a task, and was given several: reduce them first, as with Segments(ids)."
            )
        found = dict(self.columns)
        for name, given in columns.items():
            if len(given) != len(ids):
                raise PanoplyError(f"{len(ids)} tasks were to remember {len(given)} rows of '{name}'.")
            known, held = found.get(name, (ids[:0], _rows(given, ids[:0])))
            kept = (~torch.isin(known, ids)).nonzero().flatten()
            every = torch.cat([known[kept], ids])
            order = every.argsort()
            found[name] = (every[order], _rows(_stacked(_rows(held, kept), given), order))
        return TaskMemory(found)


def _rows(column: Column, rows: Tensor) -> Column:
    return column.take(rows) if isinstance(column, Ragged) else column[rows]


def _stacked(first: Column, second: Column) -> Column:
    if isinstance(first, Ragged) and isinstance(second, Ragged):
        return Ragged.cat([first, second])
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    return torch.cat([first, second.to(first.dtype)])
