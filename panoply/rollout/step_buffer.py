"""What a batch of environments went through, written step by step into arrays that are made once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class StepBuffer:
    """Arrays [steps, size, …], one a name, that grow where more steps are written than were foreseen."""

    def __init__(self, size: int, steps: int):
        self.size, self.length = size, 0
        self._room = steps
        self._columns: dict[str, Array] = {}

    def write(self, name: str, values: Array) -> None:
        """A value for every row at the current step."""
        column = self._columns.get(name)
        if column is None:
            column = np.zeros((self._room, *values.shape), dtype=values.dtype)
            self._columns[name] = column
        column[self.length] = values

    def advance(self) -> None:
        """Go on to the next step."""
        self.length += 1

    def make_room(self) -> None:
        """Before a step: more arrays where these are full."""
        if self.length == self._room:
            self._room *= 2
            doubled = {name: np.concatenate([c, np.zeros_like(c)]) for name, c in self._columns.items()}
            self._columns = doubled

    def has(self, name: str) -> bool:
        return name in self._columns

    def latest(self, name: str) -> Array:
        """What was written at the last step."""
        latest: Array = self._columns[name][self.length - 1]
        return latest

    def column(self, name: str) -> Array:
        """What was written, [steps, size, …]."""
        return self._columns[name][: self.length]

    def kept(self) -> dict[str, Array]:
        """Every column with steps and rows in one, of the rows that were `live`, in the order of time."""
        live = self.column("live").reshape(-1)
        found = {}
        for name, column in self._columns.items():
            flat = column[: self.length].reshape(self.length * self.size, *column.shape[2:])
            found[name] = flat if live.all() else flat[live]
        return found
