"""Whole episodes of text that are kept to be learned from again: the memory of `replay.episodes`.

An episode is kept as it was collected: keys, signals, and `logp` of who acted. It is drawn with the source `replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from panoply.experience import OWN, REPLAY, Column, Experience, Ragged, Segments, Table
from panoply.seeds import torch_rng

PREFIX = "episodes:"
"""Of the names under which a run saves them."""
Into = Literal["own", "asked"]


class Episodes:
    """The last `size` episodes. The oldest leave first, by whole groups where they are to come again as such.

    batch   how many groups are drawn a step, or with `into="asked"` how many episodes for each group at most
    into    whose groups they are in: their `own`, whole as they were kept, or that of this step's with the same task
    worth   which rows of what was collected are worth keeping
    """

    def __init__(
        self,
        size: int,
        batch: int,
        into: Into = "own",
        worth: Callable[[Experience], Tensor] | None = None,
        seed: int = 0,
    ):
        self.size, self.batch, self.into, self.worth, self.seed = size, batch, into, worth, seed
        self.held: Experience | None = None
        self.steps = 0
        self._new: Experience | None = None

    def __len__(self) -> int:
        """Episodes that are kept."""
        return 0 if self.held is None else len(self.held.by("episode"))

    def beside(self, experience: Experience) -> Experience:
        """What was collected in a step, and some of what is kept."""
        self._new = experience
        if self.held is None:
            return experience
        generator = torch_rng("replay", self.seed, self.steps)
        drawn = self._groups(generator) if self.into == "own" else self._asked(experience, generator)
        return Experience.mix([experience, drawn]) if len(drawn) else experience

    def keep(self) -> None:
        """When the step is done: keep what the policy itself has done in it, as far as it is worth it."""
        assert self._new is not None
        rows, self._new, self.steps = self._new, None, self.steps + 1
        mine = rows["source"] == OWN
        rows = earlier(rows.take(mine if self.worth is None else mine & self.worth(rows)))
        if not len(rows):
            return
        held = rows if self.held is None else Experience.mix([self.held, rows])
        self.held = held.take(torch.isin(held["episode"], self.staying(held)))

    def staying(self, held: Experience) -> Tensor:
        """Keys of the episodes for which there is room."""
        episodes = held.by("episode")
        units = Segments(episodes.first(held["group" if self.into == "own" else "episode"]))
        newest = units.count.flip(0).cumsum(0).flip(0) <= self.size
        return episodes.keys[units.rows(newest)]

    def _groups(self, generator: torch.Generator) -> Experience:
        """Whole groups, none of them twice."""
        assert self.held is not None
        groups = self.held.by("group").keys
        chosen = groups[torch.randperm(len(groups), generator=generator)[: self.batch]]
        return self.held.take(torch.isin(self.held["group"], chosen))

    def _asked(self, rows: Experience, generator: torch.Generator) -> Experience:
        """For every group of this step some episodes of its task, which join it."""
        assert self.held is not None
        groups = rows.by("group")
        into = dict(zip(groups.first(rows["task"]).tolist(), groups.keys.tolist(), strict=True))
        known = self.held.take(torch.isin(self.held["task"], rows["task"]))
        if not len(known):
            return known
        episodes = known.by("episode")
        order = torch.randperm(len(episodes), generator=generator)
        first = Segments(episodes.first(known["task"])[order]).grid()[:, : self.batch]
        taken = known.take(torch.isin(known["episode"], episodes.keys[order[first[first >= 0]]]))
        return taken.with_columns(group=torch.tensor([into[task] for task in taken["task"].tolist()]))

    # -------------------------------------------------------------- saving

    def state(self) -> dict[str, Tensor]:
        """As plain named tensors."""
        kept = {} if self.held is None else as_tensors(self.held)
        return {f"{PREFIX}{name}": t for name, t in {**kept, "steps": torch.tensor(self.steps)}.items()}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        mine = {name.removeprefix(PREFIX): t for name, t in named.items() if name.startswith(PREFIX)}
        self.steps = int(mine.pop("steps"))
        self.held = from_tensors(mine) if mine else None


def earlier(rows: Experience) -> Experience:
    """Own decisions whose policy has moved on: their `logp` is that of an earlier self, and so is their source."""
    return rows.with_columns(source=torch.where(rows["source"] == OWN, REPLAY, rows["source"]))


def varied(name: str) -> Callable[[Experience], Tensor]:
    """Marks the rows of groups whose episodes differ in a signal."""

    def keep(rows: Experience) -> Tensor:
        episodes = rows.by("episode")
        groups = Segments(episodes.first(rows["group"]))
        differ = ~groups.constant(episodes.sum(rows[f"signal:{name}"]))
        return torch.isin(rows["group"], groups.keys[differ])

    return keep


def earned(name: str) -> Callable[[Experience], Tensor]:
    """Marks the rows of episodes that earned a signal."""

    def keep(rows: Experience) -> Tensor:
        episodes = rows.by("episode")
        return episodes.rows(episodes.sum(rows[f"signal:{name}"])) > 0

    return keep


def as_tensors(experience: Experience) -> dict[str, Tensor]:
    """Decisions and context as named tensors; a ragged column is two."""
    found: dict[str, Tensor] = {}
    for table, columns in (("decisions", experience.decisions), ("context", experience.context)):
        for name, column in columns.items():
            where = f"{table}:{name}"
            if isinstance(column, Ragged):
                found |= {f"{where}#values": column.values, f"{where}#offsets": column.offsets}
            else:
                found[where] = column
    return found


def from_tensors(named: Mapping[str, Tensor]) -> Experience:
    """The reverse of `as_tensors`; other names are not looked at."""
    tables: dict[str, dict[str, Column]] = {"decisions": {}, "context": {}}
    for full, kept in named.items():
        table, _, name = full.partition(":")
        whole, _, piece = name.partition("#")
        if table in tables and not piece:
            tables[table][name] = kept
        elif table in tables and piece == "values":
            tables[table][whole] = Ragged(kept, named[f"{table}:{whole}#offsets"])
    return Experience(Table(tables["decisions"]), Table(tables["context"]))
