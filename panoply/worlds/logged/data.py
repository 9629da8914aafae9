"""Logged experience: what was seen, done and earned, episode by episode, in a folder of safetensors and JSON."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from panoply.errors import PanoplyError
from panoply.experience import DEMONSTRATION, OPEN, TERMINATED, TRUNCATED, Column, Experience, Table
from panoply.files import is_file, read_json, read_tensors
from panoply.seeds import stable_hash
from panoply.worlds.control.world import Array

NEEDED = ("observation", "action", "reward", "terminated", "truncated", "episode", "turn", "final")
SCALARS = ("reward", "terminated", "truncated", "episode", "turn", "logp", "expert")
FINAL = ("final", "final_legal")
"""Columns with a row for each episode."""
TENSORS, ABOUT = "data.safetensors", "about.json"


@dataclass(frozen=True)
class LoggedData:
    """Columns of equal length, one row a step, episodes one after the other and each in the order of time.

    `final` has a row for each episode: what was seen after its last step. `logp`, where the behaviour's probabilities
    are known, is the one the action was taken with. `legal` and `final_legal` say which actions could be taken, where
    not all can; `expert` marks the steps of demonstrations, where there are some.
    """

    columns: Mapping[str, Array]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [name for name in NEEDED if name not in self.columns]
        if missing:
            raise PanoplyError(
                f"Logged data lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}."
            )
        self._check_shapes()
        rows = {name: len(column) for name, column in self.columns.items() if name not in FINAL}
        if len(set(rows.values())) > 1:
            raise PanoplyError(f"Columns of logged data differ in length: {rows}.")
        if not len(self):
            raise PanoplyError("Logged data has no steps.")
        self._check_episodes()
        for name in ("observation", "action", "reward", "final"):
            if not np.isfinite(self.columns[name]).all():
                raise PanoplyError(f"Logged data has numbers in '{name}' that are not finite.")

    def _check_shapes(self) -> None:
        """A number a step in most columns; observations, actions and masks may be vectors."""
        for name, column in self.columns.items():
            if column.ndim == 0 or (name in SCALARS and column.ndim != 1):
                raise PanoplyError(f"The column '{name}' of logged data has the shape {column.shape}.")
            if column.dtype.kind not in "iufb":
                raise PanoplyError(f"The column '{name}' of logged data holds no numbers but {column.dtype}.")
            if name in ("terminated", "truncated") and column.dtype != bool:
                raise PanoplyError(
                    f"The column '{name}' of logged data is of true and false, not {column.dtype}."
                )
            if name in ("episode", "turn") and not np.issubdtype(column.dtype, np.integer):
                raise PanoplyError(f"The column '{name}' of logged data counts, and holds {column.dtype}.")
        for seen, final in (("observation", "final"), ("legal", "final_legal")):
            if {seen, final} <= set(self.columns) and self.columns[seen].shape[1:] != self.columns[
                final
            ].shape[1:]:
                raise PanoplyError(
                    f"Logged data has {seen} of shape {self.columns[seen].shape[1:]} and {final} of shape "
                    f"{self.columns[final].shape[1:]}."
                )

    def _check_episodes(self) -> None:
        episode, turn = self.columns["episode"], self.columns["turn"]
        begins = np.append(True, episode[1:] != episode[:-1])
        if len(np.unique(episode)) != begins.sum():
            raise PanoplyError("Logged data is shuffled: the steps of an episode must stand together.")
        expected = np.arange(len(episode)) - np.maximum.accumulate(
            np.where(begins, np.arange(len(episode)), 0)
        )
        if (turn - turn[begins][np.cumsum(begins) - 1] != expected).any():
            raise PanoplyError(
                "Logged data is shuffled: the steps of an episode must be in the order of time."
            )
        ended = self.columns["terminated"] | self.columns["truncated"]
        if ended[~self.last].any():
            raise PanoplyError("Logged data is shuffled: an episode goes on after its end.")
        for name, what in zip(FINAL, ("final observations", "final masks"), strict=True):
            if name in self.columns and len(self.columns[name]) != begins.sum():
                raise PanoplyError(
                    f"Logged data has {begins.sum()} episodes and {len(self.columns[name])} {what}."
                )
        if ("legal" in self.columns) != ("final_legal" in self.columns):
            raise PanoplyError("Logged data with masks needs both: the columns legal and final_legal.")

    def __len__(self) -> int:
        return len(self.columns["reward"])

    @cached_property
    def last(self) -> Array:
        """Which rows are the last of their episodes."""
        episode = self.columns["episode"]
        return np.append(episode[1:] != episode[:-1], True)

    @property
    def complete(self) -> Array:
        """Of each episode, whether it came to an end or a time limit."""
        ended: Array = (self.columns["terminated"] | self.columns["truncated"])[self.last]
        return ended

    @property
    def returns(self) -> Array:
        """The undiscounted return of each episode."""
        begins = np.append(0, np.flatnonzero(self.last)[:-1] + 1)
        return np.add.reduceat(self.columns["reward"].astype(np.float64), begins)

    @property
    def next_observation(self) -> Array:
        """What was seen after each step."""
        seen = np.roll(self.columns["observation"], -1, 0)
        seen[self.last] = self.columns["final"]
        return seen

    def experience(self) -> Experience:
        """The tables a collector would have made of it; the source is demonstration."""
        columns, n = self.columns, len(self)
        ends = np.flatnonzero(self.last)
        after = np.arange(1, n + 1)
        after[ends] = n + np.arange(len(ends))
        end = np.where(columns["terminated"], TERMINATED, np.where(columns["truncated"], TRUNCATED, OPEN))
        name = stable_hash("logged", self.about.get("name", ""))
        made: dict[str, Column] = {
            "task": torch.from_numpy(columns["episode"].astype(np.int64) ^ name),
            "group": torch.from_numpy(columns["episode"].astype(np.int64)),
            "episode": torch.from_numpy(columns["episode"].astype(np.int64)),
            "turn": torch.from_numpy(columns["turn"].astype(np.int64)),
            "context": torch.arange(n),
            "next": torch.from_numpy(after),
            "action": torch.from_numpy(columns["action"]),
            "source": torch.full((n,), DEMONSTRATION),
            "end": torch.from_numpy(end),
            "signal:reward": torch.from_numpy(columns["reward"].astype(np.float32)),
        }
        if "logp" in columns:
            made["logp"] = torch.from_numpy(columns["logp"].astype(np.float32))
        if "expert" in columns:
            made["expert"] = torch.from_numpy(columns["expert"].astype(bool))
        context: dict[str, Column] = {}
        for seen, final in zip(("observation", "legal"), FINAL, strict=True):
            if seen in columns:
                context[seen] = torch.from_numpy(np.concatenate([columns[seen], columns[final]]))
        return Experience(Table(made), Table(context))

    # -------------------------------------------------------------- files

    def save(self, folder: Path, replace: bool = True) -> None:
        """Write the folder as a whole, or not at all; unless it is to be replaced, what is there stays."""
        hidden = folder.with_name(f".{folder.name}.{os.getpid()}")
        hidden.mkdir(parents=True, exist_ok=True)
        tensors = {name: np.ascontiguousarray(column) for name, column in self.columns.items()}
        save_file(tensors, hidden / TENSORS)
        (hidden / ABOUT).write_text(json.dumps(dict(self.about), indent=2) + "\n")
        if replace and folder.exists():
            shutil.rmtree(folder)
        try:
            hidden.rename(folder)
        except OSError:
            if replace or not folder.is_dir():
                raise
            shutil.rmtree(hidden)  # another process was quicker, and somebody may be reading what it wrote

    @staticmethod
    def load(folder: Path) -> LoggedData:
        if not is_file(folder / TENSORS):
            raise PanoplyError(f"There is no logged data in '{folder}': {TENSORS} is missing.")
        try:
            columns = {name: _array(name, column) for name, column in read_tensors(folder / TENSORS).items()}
            about = read_json(folder / ABOUT, dict[str, Any]) if is_file(folder / ABOUT) else {}
            return LoggedData(columns, about)
        except PanoplyError as problem:
            raise PanoplyError(f"The logged data in '{folder}' cannot be used: {problem}") from problem


def _array(name: str, column: torch.Tensor) -> Array:
    try:
        found: Array = column.numpy()
        return found
    except TypeError as error:  # a type of numbers that NumPy does not have
        raise PanoplyError(f"The column '{name}' holds numbers of the type {column.dtype}.") from error
