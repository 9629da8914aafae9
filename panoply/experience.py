"""Experience: the flat table of decisions, and what they were taken in.

Tables with their segments, and the names of keys, have files of their own (`tables.py`, `units.py`). Parts and
methods import all of them from here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from panoply.errors import PanoplyError
from panoply.tables import Column, Ragged, Segments, Table, distinct, moved, segment_mean
from panoply.units import (
    ALTERING,
    DEMONSTRATION,
    INSIDE,
    KEY_UNITS,
    KEYS,
    OPEN,
    OWN,
    REPLAY,
    STREAMS,
    SYNTHETIC,
    TEACHER,
    TERMINATED,
    TRUNCATED,
    Unit,
)

__all__ = [
    "BLANK", "DEMONSTRATION", "KEY_UNITS", "OPEN", "OWN", "REPLAY", "STREAMS", "SYNTHETIC", "TEACHER", "TERMINATED",
    "TRUNCATED", "Column", "Experience", "Ragged", "Segments", "Table", "Unit", "distinct", "moved", "segment_mean",
    "transcript",
]  # fmt: skip


SAID = ("logp", "entropy", "kept", "answer_likelihood")
"""Columns that a policy has computed, in the context that a decision was taken in."""
BLANK = 0
"""The token that stands in a record where a vector was read and no token."""


@dataclass(frozen=True)
class Experience:
    """Decisions, the context they were taken in, and pairs or ranked lists of episodes where there are any."""

    decisions: Table
    context: Table
    pairs: Table | None = None
    lists: Table | None = None
    _segments: dict[str, Segments] = field(default_factory=dict, repr=False, compare=False)
    _whole: set[str] = field(default_factory=set, repr=False, compare=False)
    """Streams that are known to hold every decision here, and so every decision of any selection."""
    _looked_up: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, name: str) -> Tensor:
        return self.decisions.tensor(name)

    def __contains__(self, name: str) -> bool:
        return name in self.decisions

    def __len__(self) -> int:
        return self.decisions.rows

    def count(self, unit: Unit) -> int:
        """How many units there are: decisions, pairs, lists, what shares a key, or one whole batch."""
        if unit == "decision":
            return len(self)
        if unit in ("pair", "list"):
            compared = self.pairs if unit == "pair" else self.lists
            return compared.rows if compared is not None else 0
        return min(1, len(self)) if unit == "batch" else len(self.by(unit))

    def by(self, key: str) -> Segments:
        """The decisions that share a value of `key`, as segments. Turn 0 of two episodes is two segments (`INSIDE`)."""
        if key not in self._segments:
            value = self[key]
            owner = next((owner for owner in INSIDE.get(key, ()) if owner in self), None)
            if owner is not None:
                inside = Segments(value)
                value = self.by(owner).index * len(inside) + inside.index
            self._segments[key] = Segments(value)
        return self._segments[key]

    def with_columns(self, **columns: Column) -> Experience:
        """The same decisions with columns added or replaced (write `logp@x` as `**{"logp@x": …}`)."""
        decisions = self.decisions.plus(columns)
        if columns.keys() & KEYS:
            return Experience(decisions, self.context, self.pairs, self.lists)
        known = (self._segments, self._whole, self._looked_up)  # what is known of the rows stays true
        return Experience(decisions, self.context, self.pairs, self.lists, *known)

    def without(self, *names: str) -> Experience:
        """The same decisions without some of their columns."""
        kept = {name: column for name, column in self.decisions.items() if name not in names}
        return Experience(Table(kept), self.context, self.pairs, self.lists)

    @property
    def altered(self) -> bool:
        """Whether actions were drawn at a temperature or with a cut (top-k, a mask), so not from the policy itself."""
        return any(name in self for name in ALTERING)

    def unaltered(self) -> Experience:
        """The same decisions, to be scored under the policy itself: at temperature 1, with nothing cut off."""
        return self.without(*ALTERING) if self.altered else self

    def with_pairs(self, pairs: Table) -> Experience:
        return Experience(self.decisions, self.context, pairs, self.lists)

    def with_lists(self, lists: Table) -> Experience:
        """The same decisions with ranked lists: a ragged column `episodes` of episode numbers, the best first."""
        return Experience(self.decisions, self.context, self.pairs, lists)

    def take(self, rows: Tensor) -> Experience:
        """Some of the decisions, by mask or by index.

        Token sequences that none of them needs are left out, and so are pairs and lists of which an episode is missing.
        Observations are all kept: decisions only point to them, so those that are not needed cost nothing.
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
        """The same answers after other prompts. `prompts` gives new ones by row of the context table; others stay.

        Columns that a policy has computed are dropped (`logp`, `entropy`, all `…@SNAPSHOT`): they hold for the old
        prompt, and a ratio would compare two different contexts. Score the answers again, and divide by `logp@old`.
        Answers with vectors stay where they are: those were made of what the old prompt said.
        """
        if "vectors" in self.context:
            raise PanoplyError("Answers with vectors in them cannot be put after other prompts.")
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
        told = [n for n in self.decisions if n in SAID or "@" in n]
        kept = self.without(*told).decisions.plus({"position": moved})
        said: dict[str, Column] = {
            "tokens": Ragged.from_lists(tokens), "prompt": torch.tensor(number), "shared": lengths
        }  # fmt: skip
        return Experience(kept, self.context.plus(said), self.pairs, self.lists)

    def prefixed(self, vectors: Tensor) -> Experience:
        """The same answers after prompts that begin with [contexts, n, width] vectors, each with its own.

        The places that those take are tokens that are never read. What a policy has said of the answers is dropped.
        """
        if "vectors" in self.context:
            raise PanoplyError("Answers with vectors in them cannot be put after others.")
        rows, n, width = vectors.shape
        tokens = [[BLANK] * n + row for row in self.context.ragged("tokens").tolist()]
        offsets = torch.arange(rows + 1) * n
        said: dict[str, Column] = {
            "tokens": Ragged.from_lists(tokens),
            "prompt": torch.arange(rows),
            "shared": self.context.tensor("shared") + n,
            "vectors": Ragged(vectors.reshape(-1, width), offsets),
            "vectors_at": Ragged(torch.arange(n).repeat(rows), offsets),
        }
        told = [name for name in self.decisions if name in SAID or "@" in name]
        kept = self.without(*told).decisions.plus({"position": self["position"] + n})
        return Experience(kept, self.context.plus(said), self.pairs, self.lists)

    def looked_up(self, name: str, by: str = "context") -> Tensor:
        """A column of the context table, one value a decision: of the state it was taken in, or of the `next` one."""
        key = f"{name}@{by}"
        if key not in self._looked_up:
            self._looked_up[key] = self.context.tensor(name)[self[by]]
        return self._looked_up[key]

    def holds_all(self, name: str) -> bool:
        """Whether every decision belongs to this stream and learns."""
        if name not in self._whole and bool(self.stream(name).all()):
            self._whole.add(name)
        return name in self._whole

    def stream(self, name: str) -> Tensor:
        """A mask of the decisions that belong to this stream and learn."""
        mask = torch.ones(len(self), dtype=torch.bool, device=self["action"].device)
        if name in self._whole:
            return mask
        if "source" in self:
            first, *others = (self["source"] == source for source in STREAMS[name])
            mask = functools.reduce(torch.logical_or, others, first)
        return mask & self["train"].bool() if "train" in self else mask

    def to(self, device: torch.device | str) -> Experience:
        pairs = None if self.pairs is None else self.pairs.to(device)
        lists = None if self.lists is None else self.lists.to(device)
        return Experience(self.decisions.to(device), self.context.to(device), pairs, lists)

    @staticmethod
    def mix(parts: Sequence[Experience]) -> Experience:
        """Experiences of different streams in one. Where some lack a column of numbers, theirs are NaN, never zero.

        A term that wrongly looks at rows of another stream thereby becomes NaN, which is noticed at once.
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
                elif kind.is_floating_point() or name in ALTERING:
                    empty = ALTERING.get(name, torch.nan)
                    absent[name] = torch.full((len(p),), empty, dtype=kind.dtype)
                else:
                    raise ValueError(f"column '{name}' is missing from some rows and has no number for that")
            filled.append(p.with_columns(**absent))
        if any("vectors" in p.context for p in parts):
            width = next(p.context.ragged("vectors").values.shape[1] for p in parts if "vectors" in p.context)
            filled = [_with_no_vectors(p, width) for p in filled]
        return Experience.cat(filled)

    @staticmethod
    def cat(parts: Sequence[Experience]) -> Experience:
        """Several experiences in one, after one another. Episode and group numbers must already differ between them.

        Row numbers of the context table (`context`, `next`) and numbers of prompts are renumbered to stay right.
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


def _with_no_vectors(experience: Experience, width: int) -> Experience:
    """The same, in contexts that say they have none, where they do not say it."""
    context = experience.context
    if "vectors" in context:
        return experience
    none = torch.zeros(context.rows + 1, dtype=torch.long)
    said: dict[str, Column] = {
        "vectors": Ragged(torch.zeros(0, width), none), "vectors_at": Ragged(none[:0], none)
    }  # fmt: skip
    return Experience(experience.decisions, context.plus(said), experience.pairs, experience.lists)


def _whole(compared: Table, episodes: Tensor) -> Table:
    """The pairs or lists of which no episode is missing among these."""
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
    """An episode's tokens (the contexts of its turns, one after another), and the places of its decisions in them."""
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
